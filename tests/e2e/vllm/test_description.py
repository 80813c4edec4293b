"""What vLLM's configuration says of an engine, in each of its processes and on both sides."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM: make test-vllm")

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec

from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.describe import (
    Gather,
    Layers,
    describe_engine,
    joined,
    tokens_left,
)
from kvbus.integrations.vllm.offers import tables_of
from kvbus.integrations.vllm.params import Description, GroupSource
from kvbus.planning import check_compatible
from tests.e2e.vllm.configured import Configured, configure, full, layers, window

HYBRID = layers(window(48), window(48), full(), window(48), window(48), full())
GROUPS = {"window-48.0": (0, 3), "window-48.1": (1, 4), "full": (2, 5)}


def described(case: Configured, **options: Any) -> EngineSpec:
    return describe_engine(case.vllm_config, case.scheduler, engine_id="e", **options).engine


def by_workers(case: Configured) -> list[Description]:
    """What the workers of each stage say, once each knows the layers of the others."""
    size = case.vllm_config.parallel_config.tensor_parallel_size
    stages = case.workers[::size]
    found: list[tuple[Layers, str]] = []

    def describe(gather: Gather) -> list[Description]:
        config = case.vllm_config
        return [describe_engine(config, one, engine_id="e", gather=gather) for one in stages]

    def collect(*mine: Any) -> Layers:
        found.append(mine)
        return joined([mine])

    describe(collect)
    return describe(lambda *_: joined(found))


@pytest.mark.kind(
    "pipeline stages; layers with other numbers of heads; K and V of unlike size", on="memory"
)
@pytest.mark.parametrize(
    ("specs", "pp_size", "groups"),
    [
        (HYBRID, 1, GROUPS),
        (layers(*[full()] * 4), 2, {"full": (0, 1, 2, 3)}),
        (layers(window(48), window(48), full(), full()), 2, {"window-48": (0, 1), "full": (2, 3)}),
        (layers(full(), full(2)), 1, {"full.0": (0,), "full.1": (1,)}),
        (layers(*[full(head_size_v=16)] * 2), 1, {"full-k": (0, 1), "full-v": (0, 1)}),
    ],
    ids=["hybrid", "stages", "hybrid in stages", "unlike heads", "unlike k and v"],
)
def test_workers_of_all_stages_describe_same_engine_and_groups(
    tmp_path: Path, specs: Any, pp_size: int, groups: Mapping[str, tuple[int, ...]]
) -> None:
    case = configure(tmp_path, specs, pipeline_parallel_size=pp_size)

    said = by_workers(case)

    assert said == [said[0]] * pp_size
    assert said[0].engine.pp_size == pp_size
    assert {group.name: group.layers for group in said[0].engine.groups} == groups
    sources = zip(said[0].engine.groups, said[0].sources, strict=True)
    for group, source in sources if pp_size == 1 else ():
        theirs = case.scheduler.transfer_groups[source.transfer_group].kv_cache_spec
        assert (group.window is None) == isinstance(theirs, FullAttentionSpec)


def test_refused_layer_of_one_stage_is_refused_in_all(tmp_path: Path) -> None:
    case = configure(tmp_path, {**layers(full()), "odd": full()}, pipeline_parallel_size=2)
    found: list[tuple[Layers, str]] = []

    def collect(*mine: Any) -> Layers:
        found.append(mine)
        return []

    for caches in case.workers:
        with contextlib.suppress(GeometryError):  # an engine without groups
            describe_engine(case.vllm_config, caches, engine_id="e", gather=collect)

    assert [bool(problem) for _, problem in found] == [False, True]
    with pytest.raises(GeometryError, match="layer 'odd' has no number"):
        joined(found)


def split(*specs: Any) -> dict[str, torch.Tensor]:
    """Caches of layers whose kernels split each of 16 blocks into two."""
    return {name: torch.empty(32, device="meta") for name in layers(*specs)}


def test_kernel_blocks_are_the_blocks_of_a_group(tmp_path: Path) -> None:
    case, tensors = configure(tmp_path, layers(full(), full())), split(full(), full())
    config, (caches,) = case.vllm_config, case.workers

    described = describe_engine(config, caches, engine_id="e", kv_caches=tensors)

    (group,) = described.engine.groups
    assert (group.block_size, described.sources) == (16, (GroupSource(0, 2),))
    tables = tables_of(described, [[5, 3]], 16, 50)
    assert tables == ({"full": [11, 6, 7]}, {"full": 1}, set(), set())
    with pytest.raises(GeometryError):
        tables_of(described, [[5, 3]], 0, 65)


def test_split_blocks_beside_states_are_refused(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(full(), replace(GDN, **FITS)))
    tensors = split(full())

    with pytest.raises(GeometryError, match="splits blocks"):
        describe_engine(case.vllm_config, case.scheduler, engine_id="e", kv_caches=tensors)


def test_window_that_begins_behind_a_kernel_block_is_partial(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(window(18), window(18)))
    tensors = split(full(), full())
    described = describe_engine(case.vllm_config, case.workers[0], engine_id="e", kv_caches=tensors)

    tables = tables_of(described, [[5, 3]], 0, 33)

    assert tables == ({"window-18": [11, 6]}, {"window-18": 1}, {5}, {5})
    assert tables_of(described, [[5, 3]], 16, 33).gapped == set()  # the rest of it is there


def test_engines_of_other_ranks_and_block_size_are_compatible(tmp_path: Path) -> None:
    halves = layers(*(window(48, 2, block_size=64), full(2, block_size=64)) * 2)

    one = described(configure(tmp_path, layers(*(window(48), full()) * 2)))
    two = described(configure(tmp_path, halves, tensor_parallel_size=2, block_size=64))

    check_compatible(one, two)
    assert (one.groups[0].block_size, two.groups[0].block_size) == (32, 64)


@pytest.mark.parametrize("num_tokens", [1, 47, 48, 49, 50, 51, 200])
@pytest.mark.parametrize("more", [0, 2])
def test_window_is_kept_as_by_cache_manager_for_next_token(
    tmp_path: Path, num_tokens: int, more: int
) -> None:
    case = configure(tmp_path, layers(window(48), window(48)))
    (theirs,) = case.scheduler.kv_cache_groups  # vLLM adds what its drafts look ahead
    theirs.kv_cache_spec = replace(theirs.kv_cache_spec, extra_retained_tokens=more)
    (group,) = described(case).groups
    manager = SimpleNamespace(sliding_window=48, extra_retained_tokens=more)

    kept = SlidingWindowManager.get_num_skipped_tokens(manager, num_tokens)

    assert group.positions(0, num_tokens) == (kept, num_tokens)


def of_float8(folder: Path, cache_dtype: str) -> EngineSpec:
    case = configure(folder, layers(*2 * (full(**FLOAT8),)))
    case.vllm_config.cache_config.cache_dtype = cache_dtype
    return described(case)


def test_kinds_of_float8_are_told_apart(tmp_path: Path) -> None:
    e4m3, e5m2 = of_float8(tmp_path, "fp8_e4m3"), of_float8(tmp_path, "fp8_e5m2")

    assert of_float8(tmp_path, "fp8") == e4m3
    assert [one.groups[0].dtype for one in (e4m3, e5m2)] == ["float8_e4m3fn", "float8_e5m2"]
    with pytest.raises(GeometryError, match=r"full\.dtype: prefill has float8_e4m3fn"):
        check_compatible(e4m3, e5m2)


@pytest.mark.kind("separate draft models", on="memory")
@pytest.mark.parametrize(
    "name",
    ["draft_model.model.layers.0.attn", "model.mtp.layers.0.attn", "model.layers.4.mtp.attn"],
)
def test_draft_layers_count_behind_those_of_the_model(tmp_path: Path, name: str) -> None:
    case = configure(tmp_path, {**layers(*4 * (full(),)), name: full()})

    (group,) = described(case).groups

    assert group.layers == (0, 1, 2, 3, 4)


@pytest.mark.kind("MTP modules", on="memory")
@pytest.mark.parametrize(
    ("method", "specs", "num_left"),
    [("eagle", full(), 0), ("eagle", window(48), 1), ("mtp", full(), 2), ("mtp", window(48), 2)],
)
def test_prefill_leaves_what_drafts_look_ahead_to_decode(
    tmp_path: Path, method: str, specs: Any, num_left: int
) -> None:
    case = configure(tmp_path, layers(specs, specs))
    case.vllm_config.speculative_config = drafting(method)

    assert tokens_left(case.vllm_config, case.scheduler) == num_left


def drafting(method: str) -> Any:
    """A speculative configuration with three tokens; vLLM's own needs a model of each kind."""
    return SimpleNamespace(
        num_speculative_tokens=3,
        use_eagle=lambda: method in ("eagle", "mtp"),
        use_multi_module_mtp=lambda: method == "mtp",
        uses_draft_kv_cache=lambda: True,
        uses_extract_hidden_states=lambda: method == "extract_hidden_states",
    )


def test_model_is_path_revision_and_quantisation_or_option(
    tmp_path: Path,
) -> None:
    case = configure(tmp_path, layers(full()))

    assert described(case).model == f"{tmp_path}@main"
    assert described(case, model="ours").model == "ours"
    case.vllm_config.model_config.quantization = "awq"
    assert described(case).model == f"{tmp_path}@main+awq"


@dataclass(frozen=True)
class Refused:
    """What is refused: its layers, the options of vLLM, and what is changed in what that makes."""

    named: str
    match: str = "vLLM cannot be served by kvbus: .+"
    specs: tuple[Any, ...] = (full(), full())
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    group: Mapping[str, Any] = field(default_factory=dict)


GDN = MambaSpec(
    block_size=32,
    shapes=((3, 2 * 2 * 16 + 4 * 8), (4, 8, 16)),
    dtypes=(torch.float16, torch.float32),
    mamba_type=Kind.GDN_ATTN,
)
"""Two heads of 16 for queries and keys, four of 8 for values."""
LINEAR = replace(GDN, mamba_type=Kind.LINEAR, shapes=((4, 8, 8),), dtypes=(torch.float32,))
FITS = {"page_size_padded": full().page_size_bytes}
DRAFTED = {"num_speculative_blocks": 2}
RING = {"shapes": (*GDN.shapes, (4, 4)), "dtypes": (*GDN.dtypes, torch.float32)}
ODD = {"shapes": ((3, 97), (4, 8, 16))}
FLOAT8 = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
QUANTISED = full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
IN_STAGES = {"pipeline_parallel_size": 2}
DECODE_CONTEXTS, PREFILL_CONTEXTS = "decode_context_parallel_size", "prefill_context_parallel_size"
REFUSED = {
    "quantised": Refused("kv_cache_dtype", specs=(QUANTISED, QUANTISED)),
    "state": Refused("groups", "kind linear", specs=(LINEAR, LINEAR)),
    "states of drafts": Refused("speculative_config", specs=2 * (replace(GDN, **DRAFTED),)),
    "state with a ring": Refused("mamba_backend", specs=2 * (replace(GDN, **RING),)),
    "state of odd width": Refused("shapes", specs=2 * (replace(GDN, **ODD),)),
    "compressed": Refused("groups", specs=2 * (full(tokens_per_state=2),)),
    "window of one": Refused("sliding_window", specs=(window(1), window(1))),
    "odd dtype": Refused("kv_cache_dtype", specs=2 * (full(dtype=torch.float64),)),
    "quantised by setting": Refused(
        "kv_cache_dtype",
        "--kv-cache-dtype fp8",
        config={"cache_config.cache_dtype": "fp8_per_token_head"},
    ),
    "fewer heads than the model": Refused(
        "num_kv_heads",
        "one KV head on each of 2 ranks",
        specs=(full(1),),
        options={"tensor_parallel_size": 2},
    ),
    "windows beside states": Refused(
        "groups", "zeros in front", specs=(window(48), replace(GDN, **FITS), full())
    ),
    "decode contexts": Refused(DECODE_CONTEXTS, config={f"parallel_config.{DECODE_CONTEXTS}": 2}),
    "prefill contexts": Refused(
        PREFILL_CONTEXTS, config={f"parallel_config.{PREFILL_CONTEXTS}": 2}
    ),
    "sleep": Refused(
        "enable_sleep_mode",
        "--enable-sleep-mode",
        config={"model_config.enable_sleep_mode": True},
    ),
    "images by number": Refused(
        "mm_processor_cache_gb",
        "--mm-processor-cache-gb",
        config={
            "model_config.multimodal_config": SimpleNamespace(
                mm_processor_cache_gb=0, language_model_only=False
            ),
            "cache_config.enable_prefix_caching": False,
        },
    ),
    "hidden states": Refused(
        "speculative_config",
        "hidden states",
        config={"speculative_config": drafting("extract_hidden_states")},
    ),
    "drafts in stages": Refused(
        "pipeline_parallel_size",
        "draft layers",
        options=IN_STAGES,
        config={"speculative_config": drafting("eagle")},
    ),
    "memory of the host": Refused("groups", "HiSparse", group={"host_resident": True}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_what_it_is(tmp_path: Path, name: str) -> None:
    refused = REFUSED[name]
    case = configure(tmp_path, layers(*refused.specs), **refused.options)
    for path, value in refused.config.items():
        owner, _, last = path.rpartition(".")
        setattr(attrgetter(owner)(case.vllm_config) if owner else case.vllm_config, last, value)
    for key, value in refused.group.items():
        setattr(case.scheduler.kv_cache_groups[0], key, value)
    with pytest.raises(GeometryError, match=refused.match) as found:
        describe_engine(case.vllm_config, case.scheduler, engine_id="e")

    assert found.value.detail["field"] == refused.named
