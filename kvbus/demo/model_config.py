"""Owns the shape of the demo's transformer, and so of its KV cache.

Refuses shapes that attention cannot have, with the key that is wrong.
"""

from dataclasses import dataclass, fields

import torch

from kvbus.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """A small Llama. The default takes 25 MB of weights and milliseconds on one core.

    ``kv_dtype`` is that of the cache only: the model computes in float64 and gives float32 logits.
    With 16 bits or fewer, any flipped bit of the cache shows in a few steps; with more, not all do.
    """

    num_layers: int = 4
    num_query_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 256
    intermediate: int = 512
    vocab: int = 256
    rope_theta: float = 10_000.0
    max_tokens: int = 4096
    seed: int = 0
    kv_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("seed", "kv_dtype") and value <= 0:
                raise ConfigError(f"{field.name} must be positive, not {value}", key=field.name)
        if self.num_query_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_query_heads {self.num_query_heads} is not a multiple"
                f" of num_kv_heads {self.num_kv_heads}",
                key="num_query_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: RoPE needs pairs", key="head_dim")
        if not self.kv_dtype.is_floating_point:
            raise ConfigError(f"kv_dtype {self.kv_dtype} is not a float", key="kv_dtype")

    @property
    def query_heads_per_kv_head(self) -> int:
        """How many query heads share the K and V of one KV head."""
        return self.num_query_heads // self.num_kv_heads
