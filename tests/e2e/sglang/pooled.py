"""Pools as SGLang makes them, and the parts of its scheduler that describe them."""

from types import SimpleNamespace
from typing import Any

import torch


def scheduler_of(**different: Any) -> Any:
    """A scheduler of SGLang, with other options than the defaults."""
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: 4,
        get_swa_num_kv_heads=lambda tp_size: 2 // tp_size,
        num_hidden_layers=4,
    )
    options: dict[str, Any] = {
        "nnodes": 1,
        "disaggregation_mode": "prefill",
        "disaggregation_decode_host_receive_threshold": 1,
        "disaggregation_decode_allocation_policy": "early",
        "enable_memory_saver": False,
        "enable_multi_layer_eagle": False,
        **different,
    }
    free = SimpleNamespace(remaining_total=100)
    return SimpleNamespace(
        model_config=model,
        server_args=SimpleNamespace(**options),
        sliding_window_size=95,
        token_to_kv_pool_allocator=SimpleNamespace(create_prefill_budget=lambda _: free),
        tree_cache=None,
        free=free,
        max_total_num_tokens=100,
        waiting_queue=[],
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


def head_pool(
    dtype: torch.dtype = torch.float32,
    quantised_by: str | None = None,
    num_heads: int = 4,
    head_dim: int = 32,
) -> Any:
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=64,
        page_size=16,
        dtype=dtype,
        head_num=num_heads,
        head_dim=head_dim,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        quant_method=get_kv_cache_quant_method(quantised_by) if quantised_by else None,
    )


def scaled_pool() -> Any:
    """Numbers of 8 bits, and a scale for each 32 of them."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8

    return MHATokenToKVPoolMXFP8(
        size=64,
        page_size=16,
        dtype=torch.float8_e4m3fn,
        head_num=4,
        head_dim=32,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
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
    full_layers: list[int],
    window_layers: list[int],
    dtype: torch.dtype = torch.float32,
    size: int = 32,
) -> Any:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=64,
        size_swa=size,
        page_size=16,
        dtype=dtype,
        head_num=4,
        head_dim=8,
        swa_head_num=2,
        swa_attention_layer_ids=window_layers,
        full_attention_layer_ids=full_layers,
        device="cpu",
    )


def index_pool(layer_num: int = 2, without_index: tuple[int, ...] = ()) -> Any:
    """Latents, and the keys by which DeepSeek 3.2 chooses tokens."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    return DSATokenToKVPool(
        size=256,
        page_size=64,
        kv_lora_rank=64,
        dtype=torch.bfloat16,
        qk_rope_head_dim=16,
        layer_num=layer_num,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=80,
        index_buf_size=256,
        skip_topk_layers=[layer in without_index for layer in range(layer_num)],
    )


def mamba_pool(kind: str, num_ranks: int = 1, latent: bool = False) -> Any:
    """Full attention in layers 1 and 3, a state of ``kind`` in layers 0 and 2."""
    from sglang.srt.configs.mamba_utils import (
        KimiLinearCacheParams,
        KimiLinearStateShape,
        Mamba2CacheParams,
        Mamba2StateShape,
    )
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

    layers, params = [0, 2], dict[str, Any]()
    if kind == "Kimi":
        shape = KimiLinearStateShape.create(tp_world_size=num_ranks, num_heads=4, head_dim=8)
        params["cache_params"] = KimiLinearCacheParams(shape=shape, layers=layers)
    else:
        shape = Mamba2StateShape.create(
            tp_world_size=num_ranks,
            intermediate_size=32,
            n_groups=2,
            num_heads=4,
            head_dim=8,
            state_size=8,
            conv_kernel=4,
            conv_shard_groups=[16, 16, 32] if kind == "gated delta" else None,
        )
        params["cache_params"] = Mamba2CacheParams(shape=shape, layers=layers)
    mamba = MambaPool(size=6, spec_state_size=2, mamba_layer_ids=layers, device="cpu", **params)
    latents = {"use_mla": True, "kv_lora_rank": 64, "qk_rope_head_dim": 16} if latent else {}
    return HybridLinearKVPool(
        size=64,
        dtype=torch.float32,
        page_size=16,
        head_num=4 // num_ranks,
        head_dim=8,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=mamba,
        **latents,
    )


def drafted(pool: Any, draft: Any, num_heads: int = 4, algorithm: str = "EAGLE") -> Any:
    """A queue of a server with a draft model."""
    model = SimpleNamespace(get_total_num_kv_heads=lambda: num_heads)
    scheduler = scheduler_of()
    scheduler.spec_algorithm = SimpleNamespace(name=algorithm)
    scheduler.draft_worker = SimpleNamespace(
        draft_worker=SimpleNamespace(draft_runners=[SimpleNamespace(model_config=model)])
    )
    return queue_of(pool, scheduler=scheduler, draft_token_to_kv_pool=draft)
