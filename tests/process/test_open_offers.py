"""An open offer is read while it grows: what is left after the last chunk is that chunk."""

from collections.abc import Sequence

import pytest
import torch

from kvbus.engine import Fetch, Offer
from kvbus.errors import ErrorCode
from kvbus.geometry import GroupSpec, KvLayout
from kvbus.protocol import Outcome
from tests.agents import until
from tests.engines import Engine, failure_of, same
from tests.expected import expected_after, num_read_bytes
from tests.memories import Memory
from tests.process.shapes import (
    FETCH_TIMEOUT_S,
    GROUP,
    PATHS,
    STATE,
    WINDOW,
    ShapedAgents,
    Side,
    blocks_between,
    two_engines,
)
from tests.process.spread_engines import SpreadEngine

pytestmark = pytest.mark.anyio

NUM_TOKENS = 71
HND = Memory(KvLayout.parse("HND"))
SIDES = {
    "alone": (Side(tp=2, block_size=24), Side(tp=3, memory=HND)),
    "spread": (Side(tp=2, block_size=24, places="01"), Side(tp=3, memory=HND, places="010")),
}


class Growing:
    """An offer of `NUM_TOKENS` that starts empty, and a fetch of it from ``first_token`` on."""

    def __init__(
        self, source: Engine, target: Engine, *, first_token: int = 0, zero_tail: bool = False
    ) -> None:
        self.source, self.target = source, target
        self.first_token, self.zero_tail = first_token, zero_tail
        self.theirs = source.whole_blocks(5, NUM_TOKENS)
        self.ours = target.some_blocks(6, NUM_TOKENS, first_token)
        self.before = target.snapshot()
        self.wanted = expected_after(
            self.before,
            source,
            self.theirs,
            target,
            self.ours,
            num_tokens=NUM_TOKENS,
            first_token=first_token,
            zero_tail=zero_tail,
        )
        self.num_ready = 0
        self.offer: Offer
        self.fetch: Fetch

    async def start(self) -> None:
        """Offer nothing yet, and fetch all."""
        empty = blocks_between(self.source.spec, self.theirs, 0, 0)
        self.offer = await self.source.prefill.offer(
            "r", num_tokens=0, block_ids=empty, sealed=False
        )
        self.fetch = self.read()

    def read(self) -> Fetch:
        """Fetch it."""
        return self.target.decode.fetch(
            self.offer.ticket,
            num_tokens=NUM_TOKENS,
            block_ids=self.ours,
            first_token=self.first_token,
            zero_tail=self.zero_tail,
            timeout_s=FETCH_TIMEOUT_S,
        )

    async def grow(self, num_ready: int) -> None:
        """So many tokens are there."""
        more = blocks_between(self.source.spec, self.theirs, self.num_ready, num_ready)
        await self.offer.extend(num_ready, more)
        self.num_ready = num_ready
        await until(lambda: self.has(num_ready), FETCH_TIMEOUT_S)

    def has(self, num_tokens: int) -> bool:
        """Whether the first ``num_tokens`` of full attention are in the decode engine's memory."""
        wanted = self.target.views_of(self.wanted)
        size = self.target.spec.group("full").block_size
        skipped = self.first_token // size
        at = range(self.first_token, num_tokens)
        blocks = [self.ours["full"][token // size - skipped] for token in at]
        slots = [token % size for token in at]
        return all(
            torch.equal(view[blocks, slots], wanted[key][blocks, slots])
            for key, view in self.target.views().items()
            if key[1] in GROUP.layers
        )


def paths(*names: str) -> list[object]:
    """All paths, of which CI goes these."""
    return [pytest.param(p, marks=[] if p in names else pytest.mark.long) for p in PATHS]


@pytest.mark.parametrize(
    ("path", "at", "groups"),
    [
        *((path, "alone", (GROUP, WINDOW, STATE)) for path in PATHS),
        ("packed", "spread", (GROUP,)),
        pytest.param("direct", "spread", (GROUP,), marks=pytest.mark.long),
        pytest.param("mapped", "spread", (GROUP,), marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("first_token", [13, pytest.param(50, marks=pytest.mark.long)])
async def test_chunks_arrive_while_the_offer_is_open(
    shapes: ShapedAgents, path: str, at: str, groups: Sequence[GroupSpec], first_token: int
) -> None:
    async with two_engines(shapes, path, *SIDES[at], groups=groups) as (source, target):
        growing = Growing(source, target, first_token=first_token)
        await growing.start()

        for num_ready in (1, 24, 53, 71):
            await growing.grow(num_ready)
        if len(groups) > 1:
            states = target.views()[0, 4, "conv"].clone()
            assert torch.equal(states, target.views_of(growing.before)[0, 4, "conv"])
        await growing.offer.seal()
        fetched = await growing.fetch.completed()

        assert same(target.snapshot(), growing.wanted)
        places = target.places if isinstance(target, SpreadEngine) else None
        assert fetched.num_bytes == num_read_bytes(
            source, target, NUM_TOKENS, first_token, path=fetched.path, places=places
        )
        assert fetched.path == path
        assert await growing.offer.released() is Outcome.COMPLETED


@pytest.mark.parametrize("path", paths("direct"))
async def test_an_offer_that_was_opened_without_tables_gets_them_with_its_tokens(
    shapes: ShapedAgents, path: str
) -> None:
    groups = (GROUP, WINDOW, STATE)
    async with two_engines(shapes, path, *SIDES["alone"], groups=groups) as (source, target):
        theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
        firsts = source.first_blocks(NUM_TOKENS)
        wanted = expected_after(
            target.snapshot(),
            source,
            theirs,
            target,
            ours,
            num_tokens=NUM_TOKENS,
            first_blocks=firsts,
        )
        offer = await source.prefill.offer("r", num_tokens=0, block_ids={}, sealed=False)
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours, timeout_s=FETCH_TIMEOUT_S
        )

        await offer.extend(NUM_TOKENS, theirs, first_blocks=firsts)
        await offer.seal()
        await fetch.completed()

        assert same(target.snapshot(), wanted)


@pytest.mark.parametrize("path", paths("direct", "packed"))
async def test_a_seal_that_brings_no_token_ends_the_fetch_and_zeroes_the_tail(
    shapes: ShapedAgents, path: str
) -> None:
    async with two_engines(shapes, path, *SIDES["alone"]) as (source, target):
        growing = Growing(source, target, zero_tail=True)
        await growing.start()
        await growing.grow(NUM_TOKENS)

        await growing.offer.seal()
        fetched = await growing.fetch.completed()

        assert same(target.snapshot(), growing.wanted)
        assert fetched.path == path


@pytest.mark.parametrize("path", paths("packed"))
async def test_a_cancelled_fetch_of_a_growing_offer_leaves_it_to_another(
    shapes: ShapedAgents, path: str
) -> None:
    async with two_engines(shapes, path, *SIDES["alone"]) as (source, target):
        growing = Growing(source, target)
        await growing.start()
        await growing.grow(30)

        await growing.fetch.cancel()
        failure = await failure_of(growing.fetch)
        await growing.fetch.blocks_freed()
        again = growing.read()
        await growing.grow(NUM_TOKENS)
        await growing.offer.seal()
        await again.completed()

        assert failure.code is ErrorCode.CANCELLED
        assert same(target.snapshot(), growing.wanted)
