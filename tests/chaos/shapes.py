"""The engines of a chaos run: unlike in tensor parallelism, blocks, layout and memory.

Those with the same ``model`` can hand over to each other.
"""

from dataclasses import dataclass

from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, num_blocks_for

WINDOW_TOKENS = 96
CAPACITY_TOKENS = 12288
LARGE_TOKENS = 2048
RING_PART = 2
"""The ring of an engine that nobody can map has room for one part in this many of its cache."""


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
        """As it is registered."""
        return EngineSpec(self.name, self.model, self.tp, _groups(self.model, self.block_size))

    @property
    def kv_layout(self) -> KvLayout:
        """The order of the axes."""
        return KvLayout.parse(self.layout)

    def num_blocks(self, part: int = 1) -> dict[str, int]:
        """Blocks of its cache by group, or of one ``part`` of it."""
        return {
            group.name: num_blocks_for(CAPACITY_TOKENS, group.block_size) // part
            for group in self.spec.groups
        }


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
BY_NAME = {shape.name: shape for shape in SHAPES}
