"""Owns the shape of the demo's transformer, and so of its KV cache.

Refuses shapes that attention cannot have, with the key that is wrong.
"""

from dataclasses import dataclass, fields

import torch

from kvbus.demo.shape import MAX_TP, NUM_LAYERS, Attention, ModelShape
from kvbus.errors import ConfigError
from kvbus.geometry import KvPart

FULL, WINDOW = "full", "window"

UNBOUNDED = ("seed", "attention", "window", "kv_dtype")


@dataclass(frozen=True)
class ModelConfig:
    """A small Llama. The default takes 25 MB of weights and milliseconds on one core.

    ``kv_dtype`` is that of the cache only: the model computes in float64 and gives float32 logits.
    With 16 bits or fewer, any flipped bit of the cache shows in a few steps; with more, not all do.
    ``latent_dim`` is for MLA, ``num_kv_heads`` for GQA. With a ``window`` every other layer
    attends to no more than that many tokens, its own included.
    """

    num_layers: int = NUM_LAYERS
    num_query_heads: int = MAX_TP
    num_kv_heads: int = 4
    head_dim: int = 64
    latent_dim: int = 64
    hidden: int = 256
    intermediate: int = 512
    vocab: int = 256
    rope_theta: float = 10_000.0
    max_tokens: int = 4096
    seed: int = 0
    attention: Attention = Attention.GQA
    window: int | None = None
    kv_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in UNBOUNDED and value <= 0:
                raise ConfigError(f"{field.name} must be positive, not {value}", key=field.name)
        if self.num_query_heads % self.cache_heads:
            raise ConfigError(
                f"num_query_heads {self.num_query_heads} is not a multiple"
                f" of num_kv_heads {self.num_kv_heads}",
                key="num_query_heads",
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be a token or more, not {self.window}", key="window")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: RoPE needs pairs", key="head_dim")
        if not self.kv_dtype.is_floating_point:
            raise ConfigError(f"kv_dtype {self.kv_dtype} is not a float", key="kv_dtype")

    @classmethod
    def of(cls, shape: ModelShape) -> "ModelConfig":
        """The model of ``shape``; its query heads are a multiple of the KV heads, `MAX_TP` or more.

        So ranks can be that many, whatever the number of KV heads.
        """
        sharing = -(-MAX_TP // shape.kv_heads)
        return cls(
            num_query_heads=sharing * shape.kv_heads,
            num_kv_heads=shape.kv_heads,
            seed=shape.seed,
            attention=shape.attention,
            window=shape.window,
        )

    @property
    def parts(self) -> tuple[KvPart, ...]:
        """What each layer caches."""
        if self.attention is Attention.MLA:
            return (KvPart.LATENT,)
        return (KvPart.KEY, KvPart.VALUE)

    @property
    def cache_heads(self) -> int:
        """KV heads of the cache; a latent is one, which every rank holds."""
        return 1 if self.attention is Attention.MLA else self.num_kv_heads

    @property
    def cache_dim(self) -> int:
        """Elements of one head of the cache."""
        return self.latent_dim if self.attention is Attention.MLA else self.head_dim

    @property
    def query_heads_per_kv_head(self) -> int:
        """How many query heads share one head of the cache."""
        return self.num_query_heads // self.cache_heads

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The layers that share a block table, by the name of their group."""
        groups: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            name = self.group_of(layer)
            groups[name] = (*groups.get(name, ()), layer)
        return groups

    def group_of(self, layer: int) -> str:
        """The group of ``layer``."""
        return FULL if self.window_of(layer) is None else WINDOW

    def window_of(self, layer: int) -> int | None:
        """How many tokens ``layer`` attends to at most; None is all."""
        return self.window if layer % 2 else None
