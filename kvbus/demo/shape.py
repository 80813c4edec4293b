"""What a run of the demo can vary: the shape of each engine, and that of the model that both run.

Refuses nothing itself, and to import torch: the command line reads this first.
"""

from dataclasses import dataclass
from enum import StrEnum

MAX_TP = 8  # the model has at least as many query heads
NUM_LAYERS = 4


class Layout(StrEnum):
    """The order of the axes within a block of a cache."""

    NHD = "NHD"
    HND = "HND"


class Attention(StrEnum):
    """What a layer caches: K and V of some heads, or one latent that all heads share."""

    GQA = "gqa"
    MLA = "mla"


class Memory(StrEnum):
    """Where an engine's cache is, and so how its agent comes at it."""

    SHARED = "shared"
    """In memory that the agent maps."""

    HOST = "host"
    """In memory of the engine's own, as on a device; it copies through a ring of host blocks."""


class ReadPath(StrEnum):
    """How bytes are moved: as the agent thinks best, or always in one way."""

    AUTO = "auto"
    DIRECT = "direct"
    PACKED = "packed"


@dataclass(frozen=True, kw_only=True)
class Side:
    """The shape of one engine: ``tp`` ranks in each of ``pp`` stages, and their caches."""

    tp: int = 1
    pp: int = 1
    layout: Layout = Layout.NHD
    block_size: int = 16
    cross_layer: bool = False
    memory: Memory = Memory.SHARED

    def __str__(self) -> str:
        blocks = f"{self.layout} {self.block_size}" + " cross-layer" * self.cross_layer
        host = " host" * (self.memory is Memory.HOST)
        return f"tp={self.tp} pp={self.pp} {blocks}{host}"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What both engines must have alike; ``kv_heads`` is for GQA, ``window`` counts tokens."""

    seed: int = 0
    attention: Attention = Attention.GQA
    kv_heads: int = 4
    window: int | None = None
