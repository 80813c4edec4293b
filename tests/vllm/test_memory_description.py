"""What vLLM's configuration says of an engine, in each of its processes and on both sides."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla")

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec, MLAAttentionSpec

from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.description import describe_engine
from kvbus.planning import check_compatible
from tests.vllm.configured import Configured, configure, full, layers, window

HYBRID = layers(window(48), window(48), full(), window(48), window(48), full())


def described(case: Configured, **options: Any) -> EngineSpec:
    return describe_engine(case.vllm_config, case.scheduler, engine_id="e", **options)


def test_scheduler_and_workers_describe_the_same_engine(tmp_path: Path) -> None:
    case = configure(tmp_path, HYBRID)

    (worker,) = case.workers

    assert described(case) == describe_engine(case.vllm_config, worker, engine_id="e")


def test_stages_of_a_pipeline_describe_the_same_engine(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(*[full()] * 4), pipeline_parallel_size=2)

    specs = [describe_engine(case.vllm_config, one, engine_id="e") for one in case.workers]

    assert specs == [described(case)] * 2
    assert specs[0].pp_size == 2
    assert specs[0].groups[0].layers == (0, 1, 2, 3)


def test_groups_are_named_by_what_they_are(tmp_path: Path) -> None:
    spec = described(configure(tmp_path, HYBRID))

    assert {group.name: group.layers for group in spec.groups} == {
        "window-48.0": (0, 3),
        "window-48.1": (1, 4),
        "full": (2, 5),
    }


def test_group_i_is_transfer_group_i(tmp_path: Path) -> None:
    case = configure(tmp_path, HYBRID)

    kinds = [type(group.kv_cache_spec).__name__ for group in case.scheduler.transfer_groups]

    assert [group.window is None for group in described(case).groups] == [
        kind == "FullAttentionSpec" for kind in kinds
    ]


def test_engines_of_another_parallelism_and_block_size_are_compatible(tmp_path: Path) -> None:
    halves = layers(*(window(48, 2, block_size=64), full(2, block_size=64)) * 2)
    wholes = layers(*(window(48), full()) * 2)

    one, two = (
        described(configure(tmp_path, specs, **options))
        for specs, options in (
            (wholes, {}),
            (halves, {"tensor_parallel_size": 2, "block_size": 64}),
        )
    )

    check_compatible(one, two)
    assert (one.groups[0].block_size, two.groups[0].block_size) == (32, 64)


@pytest.mark.parametrize(
    ("total", "tp_size", "on_each"), [(4, 1, 4), (4, 2, 2), (4, 4, 1), (2, 4, 1), (1, 2, 1)]
)
def test_kv_heads_are_counted_once_over_all_ranks(
    tmp_path: Path, total: int, tp_size: int, on_each: int
) -> None:
    model = {"num_key_value_heads": total}

    spec = described(
        configure(tmp_path, layers(full(on_each)), model=model, tensor_parallel_size=tp_size)
    )

    assert (spec.groups[0].num_kv_heads, spec.tp_size) == (total, tp_size)


@pytest.mark.parametrize("num_tokens", [1, 47, 48, 49, 200])
def test_a_window_is_what_the_cache_manager_keeps_for_the_next_token(
    tmp_path: Path, num_tokens: int
) -> None:
    (group,) = described(configure(tmp_path, layers(window(48), window(48)))).groups
    manager = SimpleNamespace(sliding_window=48, extra_retained_tokens=0)

    kept = SlidingWindowManager.get_num_skipped_tokens(manager, num_tokens)

    assert group.positions(0, num_tokens) == (kept, num_tokens)


def test_a_latent_is_one_head_on_every_rank(tmp_path: Path) -> None:
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)

    spec = described(configure(tmp_path, layers(mla, mla), tensor_parallel_size=2))

    (group,) = spec.groups
    assert (group.name, group.parts, group.num_kv_heads) == ("latent", ("latent",), 1)
    assert (group.head_dim, group.block_size, group.dtype) == (576, 16, "bfloat16")


def test_the_model_is_its_path_and_revision_or_what_the_option_says(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(full()))

    assert described(case).model == f"{tmp_path}@main"
    assert described(case, model="ours").model == "ours"


def test_weights_of_another_quantisation_are_another_model(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(full()))

    case.vllm_config.model_config.quantization = "awq"

    assert described(case).model == f"{tmp_path}@main+awq"


REFUSED: dict[str, tuple[str, Any]] = {
    "quantised": ("kv_cache_dtype", full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)),
    "state": ("groups", MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,))),
    "heads_of_two_sizes": ("head_size_v", full(head_size_v=16)),
    "compressed": ("groups", full(tokens_per_state=2)),
    "window_of_one": ("sliding_window", window(1)),
    "odd_dtype": ("kv_cache_dtype", full(dtype=torch.float64)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_that_cannot_be_served_is_refused_with_what_it_is(
    tmp_path: Path, name: str
) -> None:
    field, spec = REFUSED[name]
    case = configure(tmp_path, layers(spec, spec))

    with pytest.raises(GeometryError, match=r"vLLM cannot be served by kvbus: .+") as refused:
        described(case)

    assert refused.value.detail["field"] == field


def test_layers_of_one_group_that_differ_are_refused_by_the_worker(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(full(4), full(2)))

    with pytest.raises(GeometryError, match="differ in num_kv_heads"):
        describe_engine(case.vllm_config, case.workers[0], engine_id="e")


def test_layers_with_fewer_heads_than_the_model_says_are_refused_over_ranks(
    tmp_path: Path,
) -> None:
    case = configure(tmp_path, layers(full(1)), tensor_parallel_size=2)

    with pytest.raises(GeometryError, match="one KV head on each of 2 ranks"):
        described(case)


def test_several_kinds_of_attention_in_stages_are_refused(tmp_path: Path) -> None:
    specs = layers(window(48), window(48), full(), full())
    case = configure(tmp_path, specs, pipeline_parallel_size=2)

    with pytest.raises(GeometryError, match="pipeline"):
        described(case)


SETTINGS = {
    "decode_context_parallel_size": ("parallel_config", 2),
    "prefill_context_parallel_size": ("parallel_config", 2),
}


@pytest.mark.parametrize("field", SETTINGS)
def test_context_parallelism_is_refused(tmp_path: Path, field: str) -> None:
    case = configure(tmp_path, layers(full()))
    part, value = SETTINGS[field]
    setattr(getattr(case.vllm_config, part), field, value)

    with pytest.raises(GeometryError) as refused:
        described(case)

    assert refused.value.detail["field"] == field


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_draft_layers_are_refused(tmp_path: Path, method: str) -> None:
    case = configure(tmp_path, layers(full()))
    case.vllm_config.speculative_config = SimpleNamespace(uses_draft_kv_cache=lambda: True)

    with pytest.raises(GeometryError, match="speculative") as refused:
        described(case)

    assert refused.value.detail["field"] == "speculative_config"


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"is_eagle_group": True}, "draft"), ({"host_resident": True}, "HiSparse")],
)
def test_groups_of_other_kinds_of_memory_are_refused(
    tmp_path: Path, changes: dict[str, bool], match: str
) -> None:
    case = configure(tmp_path, layers(full()))
    for name, value in changes.items():
        setattr(case.scheduler.kv_cache_groups[0], name, value)

    with pytest.raises(GeometryError, match=match):
        described(case)


def test_a_quantised_cache_is_refused_by_its_setting(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(full()))
    case.vllm_config.cache_config.cache_dtype = "fp8"

    with pytest.raises(GeometryError, match="--kv-cache-dtype auto"):
        described(case)
