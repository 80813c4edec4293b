"""What vLLM's configuration says of an engine, in each of its processes and on both sides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM: make test-vllm")

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec

from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.describe import describe_engine
from kvbus.planning import check_compatible
from tests.e2e.vllm.configured import Configured, configure, full, layers, window

HYBRID = layers(window(48), window(48), full(), window(48), window(48), full())
GROUPS = {"window-48.0": (0, 3), "window-48.1": (1, 4), "full": (2, 5)}


def described(case: Configured, **options: Any) -> EngineSpec:
    return describe_engine(case.vllm_config, case.scheduler, engine_id="e", **options)


@pytest.mark.parametrize(
    ("specs", "pp_size", "groups"),
    [(HYBRID, 1, GROUPS), (layers(*[full()] * 4), 2, {"full": (0, 1, 2, 3)})],
    ids=["hybrid", "stages"],
)
def test_scheduler_and_workers_describe_same_engine_and_groups(
    tmp_path: Path, specs: Any, pp_size: int, groups: Mapping[str, tuple[int, ...]]
) -> None:
    case = configure(tmp_path, specs, pipeline_parallel_size=pp_size)

    said = [describe_engine(case.vllm_config, one, engine_id="e") for one in case.workers]

    assert said == [described(case)] * pp_size
    assert said[0].pp_size == pp_size
    assert {group.name: group.layers for group in said[0].groups} == groups
    theirs = [type(group.kv_cache_spec).__name__ for group in case.scheduler.transfer_groups]
    assert [one.window is None for one in said[0].groups] == [
        kind == "FullAttentionSpec" for kind in theirs
    ]


def test_engines_of_other_ranks_and_block_size_are_compatible(tmp_path: Path) -> None:
    halves = layers(*(window(48, 2, block_size=64), full(2, block_size=64)) * 2)

    one = described(configure(tmp_path, layers(*(window(48), full()) * 2)))
    two = described(configure(tmp_path, halves, tensor_parallel_size=2, block_size=64))

    check_compatible(one, two)
    assert (one.groups[0].block_size, two.groups[0].block_size) == (32, 64)


@pytest.mark.parametrize("num_tokens", [1, 47, 48, 49, 200])
def test_window_is_kept_as_by_cache_manager_for_next_token(tmp_path: Path, num_tokens: int) -> None:
    (group,) = described(configure(tmp_path, layers(window(48), window(48)))).groups
    manager = SimpleNamespace(sliding_window=48, extra_retained_tokens=0)

    kept = SlidingWindowManager.get_num_skipped_tokens(manager, num_tokens)

    assert group.positions(0, num_tokens) == (kept, num_tokens)


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


STATE = MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,))
DRAFTS = SimpleNamespace(uses_draft_kv_cache=lambda: True)
QUANTISED = full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
IN_STAGES = {"pipeline_parallel_size": 2}
DECODE_CONTEXTS, PREFILL_CONTEXTS = "decode_context_parallel_size", "prefill_context_parallel_size"
REFUSED = {
    "quantised": Refused("kv_cache_dtype", specs=(QUANTISED, QUANTISED)),
    "state": Refused("groups", specs=(STATE, STATE)),
    "heads of two sizes": Refused("head_size_v", specs=2 * (full(head_size_v=16),)),
    "compressed": Refused("groups", specs=2 * (full(tokens_per_state=2),)),
    "window of one": Refused("sliding_window", specs=(window(1), window(1))),
    "odd dtype": Refused("kv_cache_dtype", specs=2 * (full(dtype=torch.float64),)),
    "quantised by setting": Refused(
        "kv_cache_dtype", "--kv-cache-dtype auto", config={"cache_config.cache_dtype": "fp8"}
    ),
    "fewer heads than the model": Refused(
        "num_kv_heads",
        "one KV head on each of 2 ranks",
        specs=(full(1),),
        options={"tensor_parallel_size": 2},
    ),
    "layers that differ": Refused(
        "num_kv_heads", "differ in num_kv_heads", specs=(full(4), full(2))
    ),
    "kinds of attention in stages": Refused(
        "pipeline_parallel_size",
        "pipeline",
        specs=(window(48), window(48), full(), full()),
        options=IN_STAGES,
    ),
    "decode contexts": Refused(DECODE_CONTEXTS, config={f"parallel_config.{DECODE_CONTEXTS}": 2}),
    "prefill contexts": Refused(
        PREFILL_CONTEXTS, config={f"parallel_config.{PREFILL_CONTEXTS}": 2}
    ),
    "drafts": Refused("speculative_config", "speculative", config={"speculative_config": DRAFTS}),
    "layers of drafts": Refused("groups", "draft", group={"is_eagle_group": True}),
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
    caches = case.workers[0] if name == "layers that differ" else case.scheduler

    with pytest.raises(GeometryError, match=refused.match) as found:
        describe_engine(case.vllm_config, caches, engine_id="e")

    assert found.value.detail["field"] == refused.named
