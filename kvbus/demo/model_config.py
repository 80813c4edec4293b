"""The shape of the demo's transformer, and so of its KV cache. It imports no torch."""

from dataclasses import dataclass
from enum import StrEnum

from kvbus.geometry import EngineSpec, GroupSpec, KvPart

MAX_TP = 8  # the model has at least as many query heads
MAX_KV_HEADS = 32
NUM_LAYERS = 4
MAX_TOKENS = 4096  # prompt and output together
FULL, WINDOW = "full", "window"


class Attention(StrEnum):
    """What a layer caches: K and V of some heads, or one latent that all heads share."""

    GQA = "gqa"
    MLA = "mla"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A small Llama. The default takes 25 MB of weights and milliseconds on one core.

    The first four are what a run can vary. ``kv_heads`` is for GQA, ``latent_dim`` for MLA. With a
    ``window`` every other layer attends to no more than that many tokens, its own included.
    ``kv_dtype`` is that of the cache only: the model computes in float64 and gives float32 logits.
    With 16 bits or fewer, any flipped bit of the cache shows in a few steps; with more, not all do.
    """

    seed: int = 0
    attention: Attention = Attention.GQA
    kv_heads: int = 4
    window: int | None = None
    num_layers: int = NUM_LAYERS
    head_dim: int = 64
    latent_dim: int = 64
    hidden: int = 256
    intermediate: int = 512
    vocab: int = 256
    rope_theta: float = 10_000.0
    kv_dtype: str = "bfloat16"

    @property
    def num_query_heads(self) -> int:
        """A multiple of the KV heads, `MAX_TP` or more, so that there can be that many ranks."""
        return -(-MAX_TP // self.kv_heads) * self.kv_heads

    @property
    def parts(self) -> tuple[KvPart, ...]:
        """What each layer caches."""
        if self.attention is Attention.MLA:
            return (KvPart.LATENT,)
        return (KvPart.KEY, KvPart.VALUE)

    @property
    def cache_heads(self) -> int:
        """KV heads of the cache; a latent is one, which every rank holds."""
        return 1 if self.attention is Attention.MLA else self.kv_heads

    @property
    def cache_dim(self) -> int:
        """Elements of one head of the cache."""
        return self.latent_dim if self.attention is Attention.MLA else self.head_dim

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The layers that share a block table, by the name of their group."""
        layers = range(self.num_layers)
        names = dict.fromkeys(map(self.group_of, layers))
        return {name: tuple(n for n in layers if self.group_of(n) == name) for name in names}

    def group_of(self, layer: int) -> str:
        """The group of ``layer``."""
        return FULL if self.window_of(layer) is None else WINDOW

    def window_of(self, layer: int) -> int | None:
        """How many tokens ``layer`` attends to at most; None is all."""
        return self.window if layer % 2 else None

    def spec(self, engine_id: str, *, block_size: int, tp: int = 1, pp: int = 1) -> EngineSpec:
        """An engine of this model, as the other side must know it."""
        groups = tuple(
            GroupSpec(
                name,
                layers,
                block_size,
                self.cache_heads,
                self.cache_dim,
                self.kv_dtype,
                self.parts,
                self.window_of(layers[0]),
            )
            for name, layers in self.groups.items()
        )
        return EngineSpec(engine_id, f"kvbus-demo@seed-{self.seed}", tp, groups, pp)
