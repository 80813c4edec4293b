"""Engines for the tests of whole handoffs: links, caches, and the comparison of every byte.

Axes of a view: block, token (of a block), head, dim; all as raw bits.
"""

import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbus.engine import AgentRanks, Fetch, KvCache, Link, Offer, RankMemory, share_tensor
from kvbus.engine.bounce import HostFetch, HostLink, HostPool
from kvbus.errors import ClosedError, FetchFailed
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, KvPart, num_blocks_for
from kvbus.lab import lab_engine as lab
from kvbus.protocol import Fetched, Outcome
from tests.support.agents import AgentProcess, NotInTimeError, until
from tests.support.expected import expected_after, num_read_bytes, positions
from tests.support.memories import (
    NHD,
    Memory,
    NumBlocks,
    all_bytes,
    by_group,
    private_cache,
    rank_of,
)
from tests.support.plain_sockets import ask
from tests.support.strict_links import StrictLink, bits

FULL = GroupSpec("full", (0, 1), 16, 6, 8, "bfloat16")
SMALL = GroupSpec("small", (2, 3), 4, 6, 8, "bfloat16")
LARGE = GroupSpec("full", (0,), 64, 8, 64, "bfloat16")
NUM_LARGE_BLOCKS = 512
NUM_BLOCKS = 64
FETCH_TIMEOUT_S = 60.0
RANK_SECRET = "secret-of-ranks-elsewhere"
NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
ONE_BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}

Blocks = dict[str, list[int]]
Views = dict[tuple[int, int, str], Tensor]
Snapshot = dict[int, Tensor]
"""All bytes of each rank's memory."""


@dataclass
class Engine:
    """One engine of a test; ``control`` is the link of its scheduler.

    With a ``through``, the caches are private, and their blocks pass its ring of host blocks.
    """

    spec: EngineSpec
    control: StrictLink
    caches: list[KvCache]
    num_blocks: NumBlocks
    through: "StrictEngine | None" = field(default=None, kw_only=True)
    total: int = field(default=0, kw_only=True)
    """Tokens of the next offer, for a ring."""
    places: Sequence[object] | None = field(default=None, kw_only=True)
    """The agent of each rank, where there are several."""

    @property
    def prefill(self) -> Any:
        """Takes the calls of a `Link` that offers, or fetches."""
        return self.control if self.through is None else self

    decode = prefill

    @property
    def copies_on(self) -> bool:
        """Whether the caches get only what the tokens need."""
        return self.through is not None

    @property
    def ring(self) -> HostPool:
        assert self.through is not None
        assert self.through.ring is not None
        return self.through.ring

    @property
    def host(self) -> HostLink:
        assert self.through is not None
        assert self.through.host is not None
        return self.through.host

    def fetch(self, ticket: Mapping[str, Any], **more: Any) -> HostFetch:
        assert self.through is not None
        fetch = self.through.fetch(ticket, **more).fetch
        assert isinstance(fetch, HostFetch)
        return fetch

    async def offer(self, request_id: str, *, sealed: bool = True, **more: Any) -> lab.Offered:
        """One that is not sealed will have ``total`` tokens."""
        assert self.through is not None
        total = None if sealed else self.total
        offered = await self.through.offer(request_id, total=total, **more)
        if offered.saved is not None:
            await offered.saved
        return offered

    def views(self) -> Views:
        """The whole cache as bits, by rank, layer and part; views, not copies."""
        return _views(self.caches)

    def heads(self, rank: int, layer: int, part: str) -> range:
        for region in self.caches[rank].rank.regions:
            if layer in region.layers and part in region.parts:
                return range(region.first_head, region.first_head + region.num_heads)
        raise KeyError(rank, layer, part)

    def fill(self, seed: int) -> None:
        """Random bits everywhere, NaNs included; replicas of a head are equal."""
        generator = torch.Generator().manual_seed(seed)
        for memory in self.memories().values():
            memory.copy_(random_bytes(memory.numel(), generator))
        first: dict[tuple[int, str, int], Tensor] = {}
        for (rank, layer, part), view in self.views().items():
            for at, head in enumerate(self.heads(rank, layer, part)):
                replica = view[:, :, at]
                if (of := first.setdefault((layer, part, head), replica)) is not replica:
                    replica.copy_(of)

    def memories(self) -> Snapshot:
        """All bytes of each rank; not copies."""
        return {rank: all_bytes(_any_view(cache)) for rank, cache in enumerate(self.caches)}

    def snapshot(self) -> Snapshot:
        return {rank: memory.cpu().clone() for rank, memory in self.memories().items()}

    def views_of(self, snapshot: Snapshot) -> Views:
        return _views(
            [
                KvCache(self.spec, cache.rank, snapshot[rank])
                for rank, cache in enumerate(self.caches)
            ]
        )

    def some_blocks(self, seed: int, num_tokens: int, first_token: int = 0) -> Blocks:
        """Random blocks of every group for a fetch of these tokens."""
        return self._random_blocks(
            seed, {g.name: positions(g, first_token, num_tokens) for g in self.spec.groups}
        )

    def whole_blocks(self, seed: int, num_tokens: int) -> Blocks:
        wanted = {
            group.name: range(num_tokens) if not group.state else range(min(1, num_tokens))
            for group in self.spec.groups
        }
        return self._random_blocks(seed, wanted)

    def first_read(self, block_id: int) -> Tensor:
        """The first bytes of a fetch with this least block; zeroed in a ring."""
        if self.through is not None:
            return bits(self.through.mapped[0].view(0, KvPart.KEY))[0].zero_()
        return self.views()[0, 0, KvPart.KEY][block_id]

    def first_blocks(self, num_tokens: int, first_token: int = 0) -> dict[str, int]:
        """The first block of each table of `some_blocks`."""
        firsts = {}
        for group in self.spec.groups:
            needed = positions(group, first_token, num_tokens)
            firsts[group.name] = needed[0] // group.block_size if needed else 0
        return firsts

    def _random_blocks(self, seed: int, wanted: Mapping[str, range]) -> Blocks:
        chosen = {}
        for number, group in enumerate(self.spec.groups):
            needed = len({position // group.block_size for position in wanted[group.name]})
            count = self.num_blocks
            held = count if isinstance(count, int) else count[group.name]
            chosen[group.name] = Random(seed + number).sample(range(held), needed)
        return chosen


def _views(caches: Sequence[KvCache]) -> Views:
    return {
        (rank, layer, part): bits(cache.view(layer, part))
        for rank, cache in enumerate(caches)
        for region in cache.rank.regions
        for layer in region.layers
        for part in region.parts
    }


def _any_view(cache: KvCache) -> Tensor:
    region = cache.rank.regions[0]
    return cache.view(region.layers[0], region.parts[0])


def random_bytes(num_bytes: int, generator: torch.Generator) -> Tensor:
    """Eight at a time, which is four times as fast."""
    words = torch.empty(-(-num_bytes // 8), dtype=torch.int64)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint8)[:num_bytes]


def same(one: Snapshot, other: Snapshot) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def make_spec(
    *,
    tp: int = 1,
    pp: int = 1,
    groups: Sequence[GroupSpec] = (FULL,),
    engine_id: str = "",
    model: str = "m",
) -> EngineSpec:
    return EngineSpec(engine_id or uuid.uuid4().hex, model, tp, tuple(groups), pp)


@asynccontextmanager
async def engine(
    attach: Path,
    spec: EngineSpec | None = None,
    *,
    layout: KvLayout = NHD,
    memory: Memory | None = None,
    num_blocks: NumBlocks = NUM_BLOCKS,
    ring_blocks: NumBlocks | None = None,
    seed: int = 0,
    **options: Any,
) -> AsyncIterator[Engine]:
    """A registered engine in this process, full of random bits if there is a ``seed``.

    ``memory`` replaces ``layout``; with ``ring_blocks`` the caches pass a ring. ``options`` are
    those of the lab's engine, and of the link.
    """
    spec, memory = spec or make_spec(), memory or Memory(layout)
    ring = None if ring_blocks is None else by_group(spec, ring_blocks)
    async with StrictEngine(
        attach, spec, memory, num_blocks=num_blocks, ring_blocks=ring, **options
    ) as made:
        through = made if ring else None
        engine = Engine(spec, made.link, made.caches, num_blocks, through=through)
        if seed:
            engine.fill(seed)
        yield engine
        if not isinstance(made.link.problem, ClosedError):
            await until(lambda: made.ring is None or made.ring.num_held == 0)
            made.link.check_at_end()


class StrictEngine(lab.Engine):
    """An engine with a `StrictLink`; ``memory`` says how its caches lie."""

    link_type = StrictLink
    link: StrictLink

    def __init__(
        self,
        attach: Path | str,
        spec: EngineSpec,
        memory: Memory,
        *,
        num_blocks: NumBlocks,
        **more: Any,
    ) -> None:
        self.memory = memory
        super().__init__(attach, spec, memory.layout, num_blocks=by_group(spec, num_blocks), **more)
        self.link.caches = self.mapped

    def shared_cache(self, rank: int) -> tuple[RankMemory, KvCache]:
        memory = self.memory
        if memory.is_plain:
            made = RankMemory.allocate(
                self.spec,
                rank,
                memory.layout,
                num_blocks=self.num_blocks,
                device=memory.device,
                direct=memory.direct,
            )
            return made, KvCache(self.spec, made.rank, made.tensor)
        described = rank_of(self.spec, rank, memory, self.num_blocks)
        size_bytes = described.segments[0].size_bytes
        tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=memory.device)
        made = RankMemory(described, {"kv": share_tensor(tensor)}, memory.direct)
        return made, KvCache(self.spec, described, tensor)

    def private_cache(self, rank: int) -> KvCache:
        return private_cache(self.spec, rank, self.memory, self.num_blocks)


def rank_link(
    attach: Path,
    spec: EngineSpec,
    rank: int,
    *,
    rank_secret: str | None = RANK_SECRET,
    **shape: Any,
) -> tuple[Link, KvCache]:
    """The link of a rank that may be at another agent than its scheduler, not entered yet."""
    memory = RankMemory.allocate(spec, rank, **{"layout": NHD, "num_blocks": NUM_BLOCKS, **shape})
    link = Link(attach, spec, memory=memory, control=False, rank_secret=rank_secret)
    return link, KvCache(spec, memory.rank, memory.tensor)


@dataclass
class SpreadEngine(Engine):
    """An engine at several agents; its last rank may leave and return."""

    agents: Sequence[AgentProcess]
    links: list[Link]
    shapes: Sequence[dict[str, Any]]

    async def lose(self, rank: int) -> None:
        await self.links[rank].aclose()
        del self.caches[rank:]

    async def bring_back(self, rank: int) -> None:
        link, cache = rank_link(self.agents[rank].attach, self.spec, rank, **self.shapes[rank])
        self.links[rank] = await link.__aenter__()
        self.caches.append(cache)


@asynccontextmanager
async def spread_engine(
    agents: Sequence[AgentProcess],
    spec: EngineSpec | None = None,
    *,
    layout: KvLayout = NHD,
    num_blocks: NumBlocks = NUM_BLOCKS,
    staged: Collection[int] = (),
    seed: int = 0,
) -> AsyncIterator[SpreadEngine]:
    """An engine with one rank at each agent, the first its home; ``staged`` are unregistered."""
    spec = spec or make_spec(tp=len(agents))
    shapes: list[dict[str, Any]] = [
        {"layout": layout, "num_blocks": num_blocks, "direct": rank not in staged}
        for rank in range(len(agents))
    ]
    links, caches = list[Link](), list[KvCache]()
    try:
        for rank, agent in enumerate(agents):
            link, cache = rank_link(agent.attach, spec, rank, **shapes[rank])
            links.append(await link.__aenter__())
            caches.append(cache)
        control = StrictLink(
            agents[0].attach,
            spec,
            caches=caches,
            remote_ranks=ranks_elsewhere(agents),
            rank_secret=RANK_SECRET,
        )
        async with control:
            places = [agent.peer for agent in agents]
            parts = control, caches, num_blocks, agents, links, shapes
            made = SpreadEngine(spec, *parts, places=places)
            if seed:
                made.fill(seed)
            yield made
            control.check_at_end()
    finally:
        for link in links:
            await link.aclose()


def ranks_elsewhere(agents: Sequence[AgentProcess]) -> list[AgentRanks]:
    others: dict[str, list[int]] = {}
    for rank, agent in enumerate(agents):
        if agent is not agents[0]:
            others.setdefault(agent.peer, []).append(rank)
    keys = {agent.peer: agent.started["server_key"] for agent in agents}
    return [
        AgentRanks(peer, tuple(ranks), RANK_SECRET, keys[peer]) for peer, ranks in others.items()
    ]


@asynccontextmanager
async def pair(
    prefill_attach: Path,
    decode_attach: Path,
    *,
    tp: int = 1,
    groups: Sequence[GroupSpec] = (FULL,),
    **options: Any,
) -> AsyncIterator[tuple[Engine, Engine]]:
    theirs, ours = (make_spec(tp=tp, groups=groups) for _ in range(2))
    async with (
        engine(prefill_attach, theirs, seed=1, **options) as source,
        engine(decode_attach, ours, seed=2, **options) as target,
    ):
        yield source, target


@dataclass
class Handoff:
    """A handoff in progress; ``wanted`` is the decode engine's memory at its end."""

    source: Engine
    target: Engine
    theirs: Blocks
    ours: Blocks
    wanted: Snapshot
    asked: Mapping[str, Any]
    """The arguments of the fetch."""
    offer: Offer
    fetch: Fetch
    num_ready: int
    num_offered: int
    outcome: Outcome = Outcome.COMPLETED
    """How the offer is to end for its engine."""

    async def grow(self, num_ready: int) -> None:
        more = blocks_between(self.source.spec, self.theirs, self.num_ready, num_ready)
        await self.offer.extend(num_ready, more)
        self.num_ready = num_ready

    async def seal(self, *steps: int) -> None:
        for num_ready in (*steps, self.num_offered):
            await self.grow(num_ready)
        await self.offer.seal()

    def fetch_again(self) -> None:
        asked = {"block_ids": self.ours, **self.asked}
        self.fetch = self.target.decode.fetch(self.offer.ticket, **asked)

    def has_landed(self) -> bool:
        return same(self.target.memories(), self.wanted)

    async def completed(self, *, by_earlier_agent: bool = False) -> Fetched:
        """The result; fails unless every byte is right.

        With ``by_earlier_agent``, a result without a path is of an earlier process of the agent,
        which had read and committed: this process read nothing.
        """
        fetched = await self.fetch.ended
        assert same(self.target.snapshot(), self.wanted), "the bytes are wrong"
        read_earlier = by_earlier_agent and not fetched.path
        num_bytes = num_read_bytes(
            self.source,
            self.target,
            self.asked["num_tokens"],
            self.asked["first_token"],
            path=fetched.path,
            places=self.target.places,
        )
        assert fetched.num_bytes == (0 if read_earlier else num_bytes)
        assert await self.offer.ended is self.outcome
        return fetched


async def begin(
    source: Engine,
    target: Engine,
    num_tokens: int = 40,
    *,
    first_token: int = 0,
    zero_tail: bool = False,
    offered: int | None = None,
    ready: int | None = None,
    only_tails: bool = False,
    offer: Offer | None = None,
    made: Mapping[str, Any] | None = None,
    before: Snapshot | None = None,
    parks: bool = False,
    **more: Any,
) -> Handoff:
    """Fetch tokens [first_token, num_tokens) of a new ``offer``, or of a given one.

    It has ``offered`` tokens. With ``ready`` it is open and has these tokens; without, it is
    sealed; ``only_tails`` of groups with windows. ``made`` are further options of the offer. If it
    ``parks``, the fetch begins when its engine has the blocks.
    """
    offered = num_tokens if offered is None else offered
    theirs, firsts = source.whole_blocks(3, offered), {}
    if only_tails:
        theirs, firsts = source.some_blocks(3, offered), source.first_blocks(offered)
    ours = target.some_blocks(4, num_tokens, first_token)
    asked: dict[str, Any] = {"num_tokens": num_tokens, "first_token": first_token}
    asked["zero_tail"] = zero_tail
    before = before or target.snapshot()
    wanted = expected_after(before, source, theirs, target, ours, first_blocks=firsts, **asked)
    num_ready = offered if ready is None else ready
    source.total = offered
    tables = theirs if ready is None else blocks_between(source.spec, theirs, 0, num_ready)
    offer = offer or await source.prefill.offer(
        uuid.uuid4().hex,
        num_tokens=num_ready,
        block_ids=tables,
        sealed=ready is None,
        first_blocks=firsts,
        **(made or {}),
    )
    outcome = Outcome.PARKED if parks else Outcome.COMPLETED
    if parks:
        await offer.park()
        assert await offer.ended is outcome
    asked |= {"timeout_s": FETCH_TIMEOUT_S, **more}
    fetch = target.decode.fetch(offer.ticket, block_ids=ours, **asked)
    parts = source, target, theirs, ours, wanted, asked, offer, fetch, num_ready, offered
    return Handoff(*parts, outcome)


async def hand_over(
    source: Engine, target: Engine, num_tokens: int = 40, *, steps: Sequence[int] = (), **more: Any
) -> Fetched:
    """`begin` one, which completes with every byte right; its tokens come in ``steps``."""
    ready = steps[0] if steps else None
    handoff = await begin(source, target, num_tokens, ready=ready, **more)
    if steps:
        await handoff.seal(*steps[1:])
    return await handoff.completed()


def blocks_between(
    spec: EngineSpec, blocks: Mapping[str, Sequence[int]], start: int, stop: int
) -> Blocks:
    """The blocks that tokens [start, stop) need and tokens [0, start) did not."""
    some = {}
    for group in spec.groups:
        edges = [min(1, at) if group.state else at for at in (start, stop)]
        first, end = (num_blocks_for(at, group.block_size) for at in edges)
        some[group.name] = list(blocks[group.name][first:end])
    return some


async def works(
    source: Engine, target: Engine, num_tokens: int = 40, *, before: Snapshot | None = None
) -> bool:
    """Whether a handoff gives the right bits, and all others are as now, or in ``before``."""
    handoff = await begin(source, target, num_tokens, before=before)
    await handoff.fetch.ended
    await handoff.offer.ended
    return same(target.snapshot(), handoff.wanted)


async def failure_of(fetch: Fetch | HostFetch) -> FetchFailed:
    with pytest.raises(FetchFailed) as failed:
        await fetch.ended
    return failed.value


async def start_long_read(
    source: Engine, target: Engine, *, timeout_s: float | None = None
) -> tuple[Offer, Fetch]:
    """A handoff of 64 MiB of which the first bytes have landed; the source holds random bits."""
    num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
    theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
    first = target.first_read(min(ours["full"]))
    before = first.clone()
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=num_tokens, block_ids=theirs)
    fetch = target.decode.fetch(
        offer.ticket, num_tokens=num_tokens, block_ids=ours, timeout_s=timeout_s
    )
    try:
        await until(lambda: not torch.equal(first, before))
    except NotInTimeError as error:
        error.add_note("\n".join(["history of the fetch:", *history_of(target, fetch)]))
        raise
    return offer, fetch


def history_of(target: Engine, fetch: Fetch) -> list[str]:
    endpoint = target.control.agent.peer_endpoint
    history: list[str] = ask(endpoint, "status", {"fetch_id": fetch.fetch_id})["ok"]["history"]
    return history


async def hand_over_once(prefill: AgentProcess, decode: AgentProcess) -> Any:
    """Hand over between two new engines; return the ticket."""
    async with pair(prefill.attach, decode.attach) as engines:
        handoff = await begin(*engines, 32)
        await handoff.completed()
        return handoff.offer.ticket
