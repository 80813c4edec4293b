"""What a pool of SGLang is to an agent, and which pools are none."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from kvbus.errors import ConfigError
from kvbus.geometry import KvPart, validate_rank, validate_ranks
from tests.e2e.sglang.pooled import (
    drafted,
    head_pool,
    index_pool,
    latent_pool,
    mamba_pool,
    pool_of_windows,
    queue_of,
    scaled_pool,
    scheduler_of,
)

pytestmark = pytest.mark.filterwarnings("default")  # SGLang's imports warn


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


@pytest.mark.kind("MLA", on="memory")
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


def changed(pool: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(pool, name, value)
    return pool


def options(**different: Any) -> Callable[[], Any]:
    return lambda: queue_of(head_pool(), scheduler=scheduler_of(**different))


def in_layout_of_amx() -> Any:
    pool = mamba_pool("gated delta")
    (conv,) = pool.mamba_pool.mamba_cache.conv
    conv.as_strided_(conv.shape, (*conv.stride()[:2], 1, conv.shape[2]))
    return pool


# By what is in the message: the queue, the place of the rank, and states beside pages.
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, int], list[str]]] = {
    "a pool of the kind object: .* another --disaggregation-transfer-backend": (
        lambda: queue_of(object()),
        {},
        [],
    ),
    "a pool of the kind MHATokenToKVPoolMXFP8: .*--kv-cache-dtype auto": (
        lambda: queue_of(scaled_pool()),
        {},
        [],
    ),
    "a pool of the kind MLATokenToKVPool": (
        lambda: queue_of(changed(pool_of_windows([1], [0]), swa_kv_pool=latent_pool())),
        {},
        ["swa"],
    ),
    "a pool of the kind Nothing": (
        lambda: drafted(head_pool(), type("Nothing", (), {})()),
        {},
        [],
    ),
    "keys and values of unlike size": (
        lambda: queue_of(changed(head_pool(), v_head_dim=16)),
        {},
        [],
    ),
    "a model without full attention": (
        lambda: queue_of(pool_of_windows([], [0, 1])),
        {},
        ["swa"],
    ),
    "a state of the kind block_scale": (lambda: queue_of(head_pool()), {}, ["block_scale"]),
    "index keys pooled": (
        lambda: queue_of(changed(index_pool(), index_kpool=2)),
        {},
        ["dsa"],
    ),
    "Mamba states of AMX": (
        lambda: queue_of(in_layout_of_amx()),
        {},
        ["mamba"],
    ),
    "Mamba states .* with N-grams": (
        lambda: queue_of(
            changed(
                pool := mamba_pool("Kimi"),
                mamba_pool=changed(pool.mamba_pool, _slot_siblings=[object()]),
            )
        ),
        {},
        ["mamba"],
    ),
    "a draft model of DFLASH: set --speculative-algorithm": (
        lambda: drafted(head_pool(), head_pool(), algorithm="DFLASH"),
        {},
        [],
    ),
    "a draft model of other tensor parallelism": (
        lambda: drafted(head_pool(), head_pool(num_heads=2)),
        {},
        [],
    ),
    "pipeline stages of decode: start decode with --pp-size 1": (
        options(disaggregation_mode="decode"),
        {"pp_size": 2},
        [],
    ),
    r"more than full attention \(swa\): start prefill with --pp-size 1": (
        lambda: queue_of(pool_of_windows([1], [0])),
        {"pp_size": 2},
        ["swa"],
    ),
    r"more than full attention \(mamba\)": (
        lambda: queue_of(mamba_pool("Mamba 2")),
        {"pp_size": 2},
        ["mamba"],
    ),
    r"more than full attention \(a draft model\)": (
        lambda: drafted(head_pool(), head_pool()),
        {"pp_size": 2},
        [],
    ),
    "context parallelism: .*--attn-cp-size 1": (options(), {"attn_cp_size": 2}, []),
    "context parallelism: .*--dcp-size 1": (options(), {"attn_dcp_size": 2}, []),
    "a server on several machines: .*--nnodes 1": (options(nnodes=2), {}, []),
    "the host memory of decode: .*host-receive-threshold 1": (
        options(disaggregation_decode_host_receive_threshold=0.5),
        {},
        [],
    ),
    "allocates after prefill: .*--disaggregation-decode-allocation-policy early": (
        options(disaggregation_decode_allocation_policy="prefill_complete"),
        {},
        [],
    ),
    "several draft models: start both servers without --enable-multi-layer-eagle": (
        options(enable_multi_layer_eagle=True),
        {},
        [],
    ),
    "memory to release: unset --enable-memory-saver": (
        options(enable_memory_saver=True),
        {},
        [],
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_handed_over_is_refused_by_name(one_rank: dict[str, int], named: str) -> None:
    from sglang.srt.disaggregation.base.conn import StateType

    from kvbus.integrations.sglang.pools import pools_of

    make, place, states = REFUSED[named]
    one_rank |= place

    with pytest.raises(ConfigError, match=named):
        pools_of(make(), [StateType(state) for state in states])


def test_staging_buffers_of_sglang_are_refused_by_name(
    one_rank: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")

    with pytest.raises(ConfigError, match="unset SGLANG_DISAGG_STAGING_BUFFER"):
        pools_of(queue_of(head_pool()))


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


QUANTISED: dict[str, Callable[[], Any]] = {
    "fp4_mx_block16": lambda: head_pool(torch.bfloat16, "fp4_mx_block16"),
    "float8_e4m3fnuz": lambda: head_pool(torch.float8_e4m3fnuz),
    "latent, float8_e4m3fnuz": lambda: latent_pool(torch.float8_e4m3fnuz),
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


PLAIN: dict[str, Callable[[], Any]] = {
    "float32": head_pool,
    "float16": lambda: head_pool(torch.float16),
    "bfloat16": lambda: head_pool(torch.bfloat16),
    "float8_e4m3fn": lambda: head_pool(torch.float8_e4m3fn),
    "float8_e5m2": lambda: head_pool(torch.float8_e5m2),
    "of a CPU, float8_e4m3fn": lambda: head_pool(torch.float8_e4m3fn, "cpu_fp8_e4m3"),
    "latent, float8_e4m3fn": lambda: latent_pool(torch.float8_e4m3fn),
    "windows, float8_e5m2": lambda: pool_of_windows([1], [0], torch.float8_e5m2),
}
"""By the dtype that both servers must have."""


@pytest.mark.parametrize("named", PLAIN)
def test_pool_without_scales_has_its_dtype(one_rank: dict[str, int], named: str) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    found = pools_of(queue_of(PLAIN[named]()))

    assert found.groups[0].dtype == named.rpartition(", ")[2]
    found.share(found.engine("engine", "model")).close()


def test_a_pool_in_another_layout_is_refused_by_name(
    one_rank: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")

    with pytest.raises(ConfigError, match="layout hnd: unset SGLANG_USE_HND_KVCACHE"):
        pools_of(queue_of(head_pool()))
