"""Handoffs between engines of two shapes; tests compare all memory of the decode engine."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbus.geometry import EngineSpec, GroupSpec, KvPart, StatePart, num_blocks_for, state_group
from tests.support.agents import AgentProcess
from tests.support.engines import Engine, engine, make_spec, spread_engine
from tests.support.memories import Memory

PATHS = ("direct", "staged", "packed", "mapped")
GROUP = GroupSpec("full", (0, 1), 16, 8, 4, "bfloat16")
WINDOW = GroupSpec("window", (2, 3), 8, 8, 4, "bfloat16", window=21)
STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))
LATENT = GroupSpec("latent", (0, 1, 2), 16, 1, 24, "bfloat16", (KvPart.LATENT,))
FEW_HEADS = msgspec.structs.replace(GROUP, num_kv_heads=2)
DEEP = msgspec.structs.replace(GROUP, layers=tuple(range(7)), num_kv_heads=2)
SLOT_BYTES = 8 << 10
SPARE_BLOCKS = 3
NUM_STATES = 4
PLAIN = Memory()


@dataclass(frozen=True)
class ShapedAgents:
    """A prefill agent, and a decode agent for each path; ``siblings`` have ranks elsewhere."""

    prefill: AgentProcess
    decode: Mapping[str, AgentProcess]
    siblings: Mapping[str, AgentProcess] = field(default_factory=dict)

    def of(self, side: str) -> list[AgentProcess]:
        first = self.prefill if side == "prefill" else self.decode[side]
        return [first, *([self.siblings[side]] if side in self.siblings else [])]


@dataclass(frozen=True)
class Side:
    """The shape of one engine.

    With ``host`` its cache passes a ring; ``places`` are the numbers of its ranks' agents.
    """

    tp: int = 1
    pp: int = 1
    block_size: int | None = None
    memory: Memory = PLAIN
    host: bool = False
    places: str = ""

    def spec(self, groups: Sequence[GroupSpec]) -> EngineSpec:
        sized = groups
        if self.block_size is not None:
            sized = [
                group if group.state else msgspec.structs.replace(group, block_size=self.block_size)
                for group in groups
            ]
        return make_spec(tp=self.tp, pp=self.pp, groups=sized)

    def open(
        self,
        agents: Sequence[AgentProcess],
        spec: EngineSpec,
        *,
        num_blocks: Mapping[str, int],
        seed: int,
    ) -> AbstractAsyncContextManager[Engine]:
        blocks: dict[str, Any] = {"num_blocks": num_blocks, "seed": seed}
        if self.places:
            at = [agents[int(place)] for place in self.places]
            staged = () if self.memory.direct else range(len(at))
            return spread_engine(at, spec, layout=self.memory.layout, staged=staged, **blocks)
        ring = num_blocks if self.host else None
        return engine(agents[0].attach, spec, memory=self.memory, ring_blocks=ring, **blocks)


@asynccontextmanager
async def two_engines(
    agents: ShapedAgents,
    path: str,
    prefill: Side,
    decode: Side,
    *,
    groups: Sequence[GroupSpec] = (GROUP,),
    max_tokens: int = 100,
) -> AsyncIterator[tuple[Engine, Engine]]:
    theirs, ours = prefill.spec(groups), decode.spec(groups)
    async with (
        prefill.open(
            agents.of("prefill"), theirs, num_blocks=_enough(theirs, max_tokens), seed=1
        ) as source,
        decode.open(agents.of(path), ours, num_blocks=_enough(ours, max_tokens), seed=2) as target,
    ):
        yield source, target


def _enough(spec: EngineSpec, max_tokens: int) -> dict[str, int]:
    return {
        group.name: NUM_STATES
        if group.state
        else num_blocks_for(max_tokens, group.block_size) + SPARE_BLOCKS
        for group in spec.groups
    }
