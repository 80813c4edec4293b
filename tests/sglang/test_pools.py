"""What a pool of SGLang is to an agent, and which pools are none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbus.errors import ConfigError
from kvbus.geometry import KvPart, validate_rank
from tests.sglang.servers import ENVIRONMENT, STUBS

pytestmark = pytest.mark.filterwarnings("default")  # SGLang's imports warn


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What SGLang's processes know of their place; a test may change it."""
    monkeypatch.syspath_prepend(str(STUBS))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from kvbus.integrations.sglang import pools

    sizes = ("attn_tp_size", "pp_size", "dp_size", "attn_cp_size", "attn_dcp_size")
    place = {**dict.fromkeys(sizes, 1), "attn_tp_rank": 0}
    monkeypatch.setattr(pools, "get_parallel", lambda: SimpleNamespace(**place))
    return place


def queue_of(pool: Any, **different: Any) -> Any:
    """What a queue of SGLang's scheduler has."""
    rows = SimpleNamespace(
        output_ids=torch.zeros((4, 16), dtype=torch.int32),
        bootstrap_room=torch.zeros((4, 8), dtype=torch.uint64),
        no_rows=None,
    )
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
    scheduler = SimpleNamespace(model_config=model, server_args=SimpleNamespace(nnodes=1))
    queue = {
        "token_to_kv_pool": pool,
        "metadata_buffers": rows,
        "scheduler": scheduler,
        "draft_token_to_kv_pool": None,
    }
    return SimpleNamespace(**{**queue, **different})


def latent_pool() -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=64,
        page_size=16,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


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
        ({"pp_size": 2}, {}, "pipeline stages"),
        ({"dp_size": 2}, {}, "data parallelism"),
        ({"attn_cp_size": 2}, {}, "context parallelism"),
        ({}, {"draft_token_to_kv_pool": object()}, "a draft model"),
        ({}, {"token_to_kv_pool": object()}, "a pool of the kind object"),
    ],
)
def test_what_is_not_handed_over_is_refused_by_name(
    one_rank: dict[str, int], place: dict[str, int], different: dict[str, Any], named: str
) -> None:
    from kvbus.integrations.sglang.pools import pools_of

    one_rank |= place

    with pytest.raises(ConfigError, match=named):
        pools_of(queue_of(latent_pool(), **different))


def test_a_server_without_an_agent_is_told_what_to_set() -> None:
    from kvbus.integrations.sglang.options import Options

    with pytest.raises(ConfigError, match="KVBUS_ATTACH"):
        Options.of_environment({})
