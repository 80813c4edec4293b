"""Real configurations of vLLM, of models whose layers cache what a test says, without weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

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
OPTIONS = {"dtype": "float32", "max_model_len": 64, "block_size": 32}
ATTENTION = {"block_size": 32, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}


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
    **options: Any,
) -> Configured:
    """Of a model whose `layers` are ``specs``; ``model`` and ``options`` are vLLM's own."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, **(model or {})}))
    vllm_config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        num_gpu_blocks_override=num_blocks,
        **{**OPTIONS, **options},
    ).create_engine_config()
    vllm_config.cache_config.kv_cache_layout = KVCacheLayout.LBHNC.name
    parallel = vllm_config.parallel_config
    num_stages = parallel.pipeline_parallel_size
    stages = [dict(list(specs.items())[stage::num_stages]) for stage in range(num_stages)]
    on_each = [stage for stage in stages for _ in range(parallel.tensor_parallel_size)]
    workers = get_kv_cache_configs(vllm_config, on_each, [1 << 40] * len(on_each))
    return Configured(vllm_config, generate_scheduler_kv_cache_config(workers), workers)


def full(num_heads: int = 4, **changes: Any) -> FullAttentionSpec:
    """What a layer of full attention caches on one rank."""
    return FullAttentionSpec(**{**ATTENTION, "num_kv_heads": num_heads, **changes})


def window(num_tokens: int, num_heads: int = 4, **changes: Any) -> SlidingWindowSpec:
    """What a layer of a sliding window caches on one rank."""
    window = {"num_kv_heads": num_heads, "sliding_window": num_tokens}
    return SlidingWindowSpec(**{**ATTENTION, **window, **changes})


def state(page_bytes: int, *, mode: str = "align", **changes: Any) -> MambaSpec:
    """What a short convolution of eight channels caches; ``mode`` is that of the prefix cache."""
    fields = {
        "block_size": 32,
        "shapes": ((1, 8),),
        "dtypes": (torch.float32,),
        "mamba_type": MambaAttentionBackendEnum.SHORT_CONV,
        "mamba_cache_mode": mode,
        "page_size_padded": page_bytes,
    }
    return MambaSpec(**{**fields, **changes})


def layers(*specs: Any) -> dict[str, Any]:
    """Each spec under the name of vLLM's attention layer of that number."""
    return {f"model.layers.{number}.self_attn.attn": spec for number, spec in enumerate(specs)}
