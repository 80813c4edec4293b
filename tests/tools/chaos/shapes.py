"""The engines of a chaos run: unlike in tensor parallelism, blocks, layout and memory.

Those with the same ``model`` can hand over to each other.
"""

from dataclasses import dataclass
from pathlib import Path

from kvbus.geometry import EngineSpec, GroupSpec, num_blocks_for
from tests.support.engine_program import EngineConfig

AGENTS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
WINDOW_TOKENS = 96
CAPACITY_TOKENS = 12288
LARGE_TOKENS = 2048
RING_PART = 2
"""The ring of an engine without mapped memory has room for one part in this many of its cache."""


@dataclass(frozen=True)
class Shape:
    """One engine, and which agent of its role it is at.

    ``memory`` is ``direct``, ``staged`` (not registered with NIXL) or ``ring`` (nobody maps it).
    """

    name: str
    role: str
    agent: int
    model: str
    tp: int
    block_size: int
    layout: str
    memory: str = "direct"

    @property
    def spec(self) -> EngineSpec:
        return EngineSpec(self.name, self.model, self.tp, _groups(self.model, self.block_size))

    def config(self, attach: Path, seed: int) -> EngineConfig:
        groups = self.spec.groups
        num_blocks = {one.name: num_blocks_for(CAPACITY_TOKENS, one.block_size) for one in groups}
        ring = {name: number // RING_PART for name, number in num_blocks.items()}
        return EngineConfig(
            role=self.role,
            attach=str(attach),
            spec=self.spec,
            num_blocks=num_blocks,
            layout=self.layout,
            memory=self.memory,
            ring_blocks=ring if self.memory == "ring" else {},
            seed=seed,
        )


def _groups(model: str, block_size: int) -> tuple[GroupSpec, ...]:
    if model == "latent":
        return (GroupSpec("mla", (0, 1, 2), block_size, 1, 288, "bfloat16", ("latent",)),)
    half = max(block_size // 2, 1)
    return (
        GroupSpec("full", (0, 1), block_size, 8, 64, "bfloat16"),
        GroupSpec("window", (2,), half, 8, 16, "bfloat16", window=WINDOW_TOKENS),
    )


SHAPES = (
    Shape("p-wide", "prefill", 0, "gqa", 2, 16, "NHD"),
    Shape("p-ring", "prefill", 1, "gqa", 1, 32, "HND", "ring"),
    Shape("p-latent", "prefill", 1, "latent", 1, 16, "NHD", "staged"),
    Shape("d-wide", "decode", 0, "gqa", 4, 16, "HND"),
    Shape("d-ring", "decode", 1, "gqa", 1, 64, "NHD", "ring"),
    Shape("d-latent", "decode", 0, "latent", 2, 64, "NHD"),
    Shape("d-same", "decode", 1, "gqa", 2, 16, "NHD"),
)
