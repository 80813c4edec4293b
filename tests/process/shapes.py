"""Handoffs between engines of two shapes, all bytes of the decode engine compared.

Refuses to compare less than the whole memory: what must not change did not.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from kvbus.engine import DecodeSession, Offer, PrefillSession
from kvbus.geometry import (
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    StatePart,
    num_blocks_for,
    state_group,
)
from kvbus.protocol import Fetched, Outcome
from tests.agents import AgentProcess
from tests.engines import Blocks, Engine, engine, make_spec, same
from tests.expected import expected_after, num_read_bytes
from tests.host_engines import HostEngine, host_engine
from tests.memories import Memory
from tests.process.spread_engines import SpreadEngine, spread_engine

PATHS = ("direct", "packed", "reordered", "mapped")
GROUP = GroupSpec("full", (0, 1), 16, 8, 4, "bfloat16")
WINDOW = GroupSpec("window", (2, 3), 8, 8, 4, "bfloat16", window=21)
STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))
LATENT = GroupSpec("latent", (0, 1, 2), 16, 1, 24, "bfloat16", (KvPart.LATENT,))
FEW_HEADS = msgspec.structs.replace(GROUP, num_kv_heads=2)
DEEP = msgspec.structs.replace(GROUP, layers=tuple(range(7)), num_kv_heads=2)
SLOT_BYTES = 8 << 10
SPARE_BLOCKS = 3
NUM_STATES = 4
FETCH_TIMEOUT_S = 60.0
"""An agent imports torch for its first box, which takes long on a busy machine."""
PLAIN = Memory()


@dataclass(frozen=True)
class ShapedAgents:
    """A prefill agent, and a decode agent that is forced to each path, or to none (``auto``).

    ``siblings`` are second ones, of ``prefill`` and of the paths, for ranks that are elsewhere.
    """

    prefill: AgentProcess
    decode: Mapping[str, AgentProcess]
    siblings: Mapping[str, AgentProcess] = field(default_factory=dict)

    def of(self, side: str) -> list[AgentProcess]:
        """All agents of ``prefill``, or of the decode engines with a path."""
        first = self.prefill if side == "prefill" else self.decode[side]
        return [first, *([self.siblings[side]] if side in self.siblings else [])]


@dataclass(frozen=True)
class Side:
    """What one engine has of its own.

    With ``host`` its cache goes through a ring; with ``places`` its ranks are at several agents,
    whose numbers these are.
    """

    tp: int = 1
    pp: int = 1
    block_size: int | None = None
    memory: Memory = PLAIN
    host: bool = False
    places: str = ""

    def spec(self, groups: Sequence[GroupSpec]) -> EngineSpec:
        """An engine with these groups, in blocks of its own."""
        sized = groups
        if self.block_size is not None:
            sized = [
                group if group.state else msgspec.structs.replace(group, block_size=self.block_size)
                for group in groups
            ]
        return make_spec(tp=self.tp, pp=self.pp, groups=sized)

    def open(
        self,
        kind: type[PrefillSession] | type[DecodeSession],
        agents: Sequence[AgentProcess],
        spec: EngineSpec,
        *,
        num_blocks: Mapping[str, int],
        seed: int,
    ) -> AbstractAsyncContextManager[Engine]:
        """The engine, at one or all of these agents."""
        blocks: dict[str, Any] = {"num_blocks": num_blocks, "seed": seed}
        if self.places:
            at = [agents[int(place)] for place in self.places]
            staged = () if self.memory.direct else range(len(at))
            return spread_engine(kind, at, spec, layout=self.memory.layout, staged=staged, **blocks)
        opened = host_engine if self.host else engine
        return opened(kind, agents[0].attach, spec, memory=self.memory, **blocks)


def laid_out(layout: str, *, cross_layer: bool = False, tp: int = 1) -> Side:
    """A side with this layout."""
    return Side(tp=tp, memory=Memory(KvLayout.parse(layout, cross_layer=cross_layer)))


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
    """A prefill engine and a decode engine, the latter at the agent for ``path``."""
    theirs, ours = prefill.spec(groups), decode.spec(groups)
    async with (
        prefill.open(
            PrefillSession,
            agents.of("prefill"),
            theirs,
            num_blocks=_enough(theirs, max_tokens),
            seed=1,
        ) as source,
        decode.open(
            DecodeSession, agents.of(path), ours, num_blocks=_enough(ours, max_tokens), seed=2
        ) as target,
    ):
        yield source, target


async def hand_over(
    source: Engine,
    target: Engine,
    num_tokens: int,
    *,
    first_token: int = 0,
    offered: int | None = None,
    only_tails: bool = False,
    zero_tail: bool = False,
    steps: Sequence[int] = (),
) -> Fetched:
    """Move tokens [first_token, num_tokens) and fail unless every byte is right.

    ``offered`` tokens are there, ``only_tails`` of the groups with windows, or they come in
    ``steps``, the offer open until then.
    """
    offered = num_tokens if offered is None else offered
    theirs = source.whole_blocks(5, offered)
    firsts = {}
    if only_tails:
        theirs, firsts = source.some_blocks(5, offered), source.first_blocks(offered)
    ours = target.some_blocks(6, num_tokens, first_token)
    wanted = expected_after(
        target.snapshot(),
        source,
        theirs,
        target,
        ours,
        num_tokens=num_tokens,
        first_token=first_token,
        first_blocks=firsts,
        zero_tail=zero_tail,
    )
    ready = steps[0] if steps else offered
    if isinstance(source, HostEngine):
        source.total = offered
    offer = await source.prefill.offer(
        "r",
        num_tokens=ready,
        block_ids=blocks_between(source.spec, theirs, 0, ready) if steps else theirs,
        sealed=not steps,
        first_blocks=firsts,
    )
    fetch = target.decode.fetch(
        offer.ticket,
        num_tokens=num_tokens,
        block_ids=ours,
        first_token=first_token,
        zero_tail=zero_tail,
        timeout_s=FETCH_TIMEOUT_S,
    )
    if steps:
        await _grow(offer, source, theirs, (*steps, offered))
    fetched: Fetched = await fetch.completed()
    assert same(target.snapshot(), wanted)
    assert fetched.num_bytes == num_read_bytes(
        source,
        target,
        num_tokens,
        first_token,
        path=fetched.path,
        places=target.places if isinstance(target, SpreadEngine) else None,
    )
    assert await offer.released() is Outcome.COMPLETED
    return fetched


def blocks_between(spec: EngineSpec, blocks: Blocks, start: int, stop: int) -> Blocks:
    """The blocks that tokens [start, stop) need and tokens [0, start) did not."""
    some = {}
    for group in spec.groups:
        edges = [min(1, at) if group.state else at for at in (start, stop)]
        first, end = (num_blocks_for(at, group.block_size) for at in edges)
        some[group.name] = blocks[group.name][first:end]
    return some


async def _grow(offer: Offer, source: Engine, blocks: Blocks, steps: Sequence[int]) -> None:
    for before, now in pairwise(steps):
        await offer.extend(now, blocks_between(source.spec, blocks, before, now))
    await offer.seal()


def _enough(spec: EngineSpec, max_tokens: int) -> dict[str, int]:
    return {
        group.name: NUM_STATES
        if group.state
        else num_blocks_for(max_tokens, group.block_size) + SPARE_BLOCKS
        for group in spec.groups
    }
