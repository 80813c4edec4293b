"""Real configurations of vLLM, with real caches and CPU attention, but no engine and no weights.

Refuses to stand in for vLLM: groups, caches and what is written to them are its own doing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Configured:
    """What a connector is given: the scheduler's, and each worker's configuration of caches."""

    vllm_config: VllmConfig
    scheduler: KVCacheConfig
    workers: list[KVCacheConfig]


def configure(
    folder: Path,
    specs: Mapping[str, Any],
    *,
    model: Mapping[str, Any] | None = None,
    num_blocks: int = 16,
    **arguments: Any,
) -> Configured:
    """vLLM's configuration of a model whose layers cache ``specs``, by layer number."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, **(model or {})}))
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "block_size": 32}
    vllm_config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        num_gpu_blocks_override=num_blocks,
        **{**options, **arguments},
    ).create_engine_config()
    vllm_config.cache_config.kv_cache_layout = KVCacheLayout.LBHNC.name
    parallel = vllm_config.parallel_config
    stages = [
        dict(list(specs.items())[stage :: parallel.pipeline_parallel_size])
        for stage in range(parallel.pipeline_parallel_size)
    ]
    on_each = [stage for stage in stages for _ in range(parallel.tensor_parallel_size)]
    workers = get_kv_cache_configs(vllm_config, on_each, [1 << 40] * len(on_each))
    return Configured(vllm_config, generate_scheduler_kv_cache_config(workers), workers)


def full(num_heads: int = 4, **changes: Any) -> FullAttentionSpec:
    """What a layer of full attention caches on one rank."""
    return FullAttentionSpec(**{**_attention(num_heads), **changes})


def window(num_tokens: int, num_heads: int = 4, **changes: Any) -> SlidingWindowSpec:
    """What a layer of a sliding window caches on one rank."""
    return SlidingWindowSpec(**{**_attention(num_heads), "sliding_window": num_tokens, **changes})


def layers(*specs: Any) -> dict[str, Any]:
    """Each spec under the name of vLLM's attention layer of that number."""
    return {f"model.layers.{number}.self_attn.attn": spec for number, spec in enumerate(specs)}


def caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """As `register_kv_caches` is given them."""
    made: dict[str, torch.Tensor]
    made = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    return made


def attention(vllm_config: VllmConfig, cache: torch.Tensor, *, isa: str = "vec") -> Any:
    """A layer of the CPU backend, which writes to caches as in a worker."""
    num_heads = cache.shape[1]
    with set_current_vllm_config(vllm_config):
        impl = CPUAttentionBackendImpl(
            num_heads=num_heads,
            head_size=cache.shape[-1] // 2,
            scale=1.0,
            num_kv_heads=num_heads,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
        )
    return SimpleNamespace(
        impl=impl, isa=isa, kv_cache=cache, _k_scale_float=1.0, _v_scale_float=1.0
    )


def latent_attention(cache: torch.Tensor, kv_lora_rank: int) -> Any:
    """A layer of the CPU backend for MLA; what it writes with needs none of its set-up."""
    return SimpleNamespace(
        impl=CPUMLAImpl.__new__(CPUMLAImpl),
        kv_lora_rank=kv_lora_rank,
        kv_cache=cache.squeeze(1),
        kv_cache_dtype="auto",
        _k_scale=torch.ones(()),
    )


def _attention(num_heads: int) -> dict[str, Any]:
    return {
        "block_size": 32,
        "num_kv_heads": num_heads,
        "head_size": 32,
        "dtype": torch.float32,
    }
