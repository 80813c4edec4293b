"""What a pool of SGLang is to an agent, and which pools are none."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbus.errors import ConfigError
from kvbus.geometry import KvPart, validate_rank, validate_ranks

pytestmark = pytest.mark.filterwarnings("default")  # SGLang's imports warn


def scheduler_of(**different: Any) -> Any:
    """A scheduler of SGLang, with other options than the defaults."""
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: 4,
        get_swa_num_kv_heads=lambda tp_size: 2 // tp_size,
        num_hidden_layers=4,
    )
    options: dict[str, Any] = {"nnodes": 1, "disaggregation_decode_host_receive_threshold": 1}
    options |= {"disaggregation_mode": "prefill", **different}
    return SimpleNamespace(
        model_config=model, server_args=SimpleNamespace(**options), sliding_window_size=95
    )


def queue_of(pool: Any, **different: Any) -> Any:
    """What a queue of SGLang's scheduler has."""
    rows = SimpleNamespace(
        output_ids=torch.zeros((4, 16), dtype=torch.int32),
        bootstrap_room=torch.zeros((4, 8), dtype=torch.uint64),
        no_rows=None,
    )
    queue = {
        "token_to_kv_pool": pool,
        "metadata_buffers": rows,
        "scheduler": scheduler_of(),
        "draft_token_to_kv_pool": None,
    }
    return SimpleNamespace(**{**queue, **different})


def head_pool(dtype: torch.dtype = torch.float32, quantised_by: str | None = None) -> Any:
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=64,
        page_size=16,
        dtype=dtype,
        head_num=4,
        head_dim=32,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        quant_method=get_kv_cache_quant_method(quantised_by) if quantised_by else None,
    )


def latent_pool(dtype: torch.dtype = torch.bfloat16) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=64,
        page_size=16,
        dtype=dtype,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


def pool_of_windows(
    full_layers: list[int], window_layers: list[int], dtype: torch.dtype = torch.float32
) -> Any:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=64,
        size_swa=32,
        page_size=16,
        dtype=dtype,
        head_num=4,
        head_dim=8,
        swa_head_num=2,
        swa_attention_layer_ids=window_layers,
        full_attention_layer_ids=full_layers,
        device="cpu",
    )


def test_layers_with_a_window_are_a_group_of_their_own(one_rank: dict[str, int]) -> None:
    from kvbus.integrations.sglang.pools import FULL, METADATA, WINDOW, pools_of

    pool = pool_of_windows([1, 3, 5], [0, 2, 4])
    pool.swa_kv_pool.k_buffer[1][17, 0, :3] = torch.tensor([1.0, 2.0, 3.0])

    found = pools_of(queue_of(pool))
    engine = found.engine("engine", "model")
    memory = found.share(engine)

    validate_rank(engine, memory.rank)
    full, window, metadata = engine.groups
    assert (full.name, full.layers, full.num_kv_heads, full.window) == (FULL, (1, 3, 5), 4, None)
    assert (window.name, window.layers, window.num_kv_heads) == (WINDOW, (0, 2, 4), 2)
    assert (window.window, window.block_size, metadata.name) == (95, 16, METADATA)
    assert memory.rank.num_blocks == {FULL: 5, WINDOW: 3, METADATA: 4}
    assert pool.swa_kv_pool.k_buffer[1][17, 0, :3].tolist() == [1.0, 2.0, 3.0]
    for part in (pool.full_kv_pool, pool.swa_kv_pool):
        assert part.k_data_ptrs.tolist() == [buffer.data_ptr() for buffer in part.k_buffer]
    memory.close()


def test_a_latent_is_one_head_that_every_rank_holds(one_rank: dict[str, int]) -> None:
    from kvbus.integrations.sglang.pools import FULL, METADATA, pools_of

    one_rank |= {"attn_tp_size": 2, "attn_tp_rank": 1}
    pool = latent_pool()
    pool.kv_buffer[1][17, 0, :3] = torch.tensor([1.0, 2.0, 3.0])

    found = pools_of(queue_of(pool))
    engine = found.engine("engine", "model")
    memory = found.share(engine)

    validate_rank(engine, memory.rank)
    full, metadata = engine.groups
    assert (full.name, full.block_size, full.num_kv_heads, full.head_dim) == (FULL, 16, 1, 80)
    assert (full.dtype, full.parts, full.layers) == ("bfloat16", (KvPart.LATENT,), (0, 1))
    assert (metadata.name, metadata.optional) == (METADATA, True)
    assert [part.unit_bytes for part in metadata.state] == [64, 64]
    assert pool.kv_buffer[1][17, 0, :3].tolist() == [1.0, 2.0, 3.0]
    assert pool.data_ptrs.tolist() == [buffer.data_ptr() for buffer in pool.kv_buffer]
    memory.close()


@pytest.mark.parametrize(
    ("place", "different", "named"),
    [
        (
            {"pp_size": 2},
            {"scheduler": scheduler_of(disaggregation_mode="decode")},
            "pipeline stages, at decode",
        ),
        ({"dp_size": 2}, {}, "data parallelism"),
        ({"attn_cp_size": 2}, {}, "context parallelism"),
        ({}, {"draft_token_to_kv_pool": object()}, "a draft model"),
        ({}, {"token_to_kv_pool": object()}, "a pool of the kind object"),
        ({}, {"scheduler": scheduler_of(nnodes=2)}, "a server on several machines"),
        (
            {},
            {"scheduler": scheduler_of(disaggregation_decode_host_receive_threshold=0.5)},
            "the host memory of decode",
        ),
    ],
)
def test_what_is_not_handed_over_is_refused_by_name(
    one_rank: dict[str, int], place: dict[str, int], different: dict[str, Any], named: str
) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    one_rank |= place

    with pytest.raises(ConfigError, match=named):
        pools_of(queue_of(latent_pool(), **different))


def test_stage_holds_its_layers_and_rank_0_of_last_one_metadata(
    one_rank: dict[str, int],
) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from kvbus.integrations.sglang.pools import METADATA, pools_of

    one_rank |= {"pp_size": 2, "attn_tp_size": 2}
    ranks = []
    for stage, number in product(range(2), range(2)):
        one_rank |= {"pp_rank": stage, "attn_tp_rank": number}
        pool = MHATokenToKVPool(
            size=64,
            page_size=16,
            dtype=torch.float32,
            head_num=2,
            head_dim=8,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
            start_layer=2 * stage,
            end_layer=2 * stage + 1,
        )
        found = pools_of(queue_of(pool))
        engine = found.engine("engine", "model")
        memory = found.share(engine)
        ranks.append(memory.rank)
        memory.close()

    validate_ranks(engine, ranks)
    assert engine.groups[0].layers == (0, 1, 2, 3)
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    assert [METADATA in rank.num_blocks for rank in ranks] == [False, False, True, False]


def test_each_rank_of_decode_has_metadata_of_its_own(one_rank: dict[str, int]) -> None:
    from kvbus.integrations.sglang.pools import METADATA, pools_of

    one_rank |= {"attn_tp_size": 2}
    has_metadata = []
    for number in range(2):
        one_rank |= {"attn_tp_rank": number}
        queue = queue_of(latent_pool(), scheduler=scheduler_of(disaggregation_mode="decode"))
        found = pools_of(queue)
        memory = found.share(found.engine("engine", "model"))
        has_metadata.append(METADATA in memory.rank.num_blocks)
        memory.close()

    assert has_metadata == [True, True]


def test_windows_alone_and_odd_window_pools_are_refused(
    one_rank: dict[str, int],
) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    strange = pool_of_windows([1], [0])
    strange.swa_kv_pool = latent_pool()

    with pytest.raises(ConfigError, match="all have a sliding window"):
        pools_of(queue_of(pool_of_windows([], [0, 1])))
    one_rank["pp_size"] = 2
    with pytest.raises(ConfigError, match="stages of layers with a sliding window"):
        pools_of(queue_of(pool_of_windows([1], [0])))
    with pytest.raises(ConfigError, match="a pool of the kind MLATokenToKVPool"):
        pools_of(queue_of(strange))


QUANTISED: dict[str, Callable[[], Any]] = {
    "float8_e4m3fn": lambda: head_pool(torch.float8_e4m3fn),
    "float8_e5m2": lambda: head_pool(torch.float8_e5m2),
    "cpu_fp8_e4m3": lambda: head_pool(torch.float8_e4m3fn, "cpu_fp8_e4m3"),
    "fp4_mx_block16": lambda: head_pool(torch.bfloat16, "fp4_mx_block16"),
    "latent, float8_e4m3fn": lambda: latent_pool(torch.float8_e4m3fn),
    "windows, float8_e5m2": lambda: pool_of_windows([1], [0], torch.float8_e5m2),
}
"""By what is in the message."""


@pytest.mark.parametrize("named", QUANTISED)
def test_quantised_pool_is_refused_with_setting_to_change(
    one_rank: dict[str, int], named: str
) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    dtype = named.rpartition(", ")[2]

    with pytest.raises(ConfigError, match=rf"quantised pool \({dtype}\).*--kv-cache-dtype auto"):
        pools_of(queue_of(QUANTISED[named]()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_pool_of_plain_numbers_is_not_refused(
    one_rank: dict[str, int], dtype: torch.dtype
) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    found = pools_of(queue_of(head_pool(dtype)))

    assert found.groups[0].dtype == str(dtype).removeprefix("torch.")


def test_a_pool_in_another_layout_is_refused_by_name(
    one_rank: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")

    with pytest.raises(ConfigError, match="layout hnd: unset SGLANG_USE_HND_KVCACHE"):
        pools_of(queue_of(head_pool()))
