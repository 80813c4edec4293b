"""An open offer is read while it grows: what is left after the last chunk is that chunk."""

import pytest
import torch

from kvbus.engine import Fetch, Offer
from kvbus.errors import ErrorCode
from kvbus.geometry import GroupSpec, KvLayout, StatePart, state_group
from kvbus.protocol import Outcome
from tests.agents import until
from tests.e2e.shapes import (
    FETCH_TIMEOUT_S,
    GROUP,
    PATHS,
    Side,
    blocks_between,
    hand_over,
    two_engines,
)
from tests.engines import Blocks, Engine, expected_after, failure_of, same
from tests.expected import num_read_bytes
from tests.memories import Memory

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("path", PATHS)]

WINDOW = GroupSpec("window", (2, 3), 8, 8, 4, "bfloat16", window=21)
STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))
PREFILL = Side(tp=2, block_size=24)
DECODE = Side(tp=3, memory=Memory(KvLayout.parse("HND")))


class Growing:
    """An offer of ``num_tokens`` that starts empty, and a fetch of it from ``first_token`` on."""

    def __init__(
        self,
        source: Engine,
        target: Engine,
        *,
        num_tokens: int,
        first_token: int = 0,
        zero_tail: bool = False,
    ) -> None:
        self.source, self.target = source, target
        self.num_tokens, self.first_token = num_tokens, first_token
        self.zero_tail = zero_tail
        self.theirs: Blocks = source.whole_blocks(5, num_tokens)
        self.ours: Blocks = target.some_blocks(6, num_tokens, first_token)
        self.before = target.snapshot()
        self.wanted = expected_after(
            self.before,
            source,
            self.theirs,
            target,
            self.ours,
            num_tokens=num_tokens,
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
        self.fetch = self.target.decode.fetch(
            self.offer.ticket,
            num_tokens=self.num_tokens,
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

    def has(self, num_tokens: int) -> bool:
        """Whether the first ``num_tokens`` of full attention are in the decode engine's memory."""
        wanted = self.target.views_of(self.wanted)
        size = self.target.spec.group("full").block_size
        skipped = self.first_token // size
        return all(
            torch.equal(
                view[self.ours["full"][at // size - skipped], at % size],
                wanted[key][self.ours["full"][at // size - skipped], at % size],
            )
            for key, view in self.target.views().items()
            if key[1] in GROUP.layers
            for at in range(self.first_token, num_tokens)
        )


@pytest.mark.parametrize("first_token", [0, 13, 50])
async def test_chunks_arrive_while_the_offer_is_open(shapes, path, first_token):
    groups = (GROUP, WINDOW, STATE)
    async with two_engines(shapes, path, PREFILL, DECODE, groups=groups) as (source, target):
        growing = Growing(source, target, num_tokens=71, first_token=first_token)
        await growing.start()

        for num_ready in (1, 24, 53, 71):
            await growing.grow(num_ready)
            await until(lambda ready=num_ready: growing.has(ready))
        states = target.views()[0, 4, "conv"].clone()
        await growing.offer.seal()
        fetched = await growing.fetch.completed()

        assert torch.equal(states, target.views_of(growing.before)[0, 4, "conv"])
        assert same(target.snapshot(), growing.wanted)
        assert fetched.num_bytes == num_read_bytes(
            source, target, 71, first_token, path=fetched.path
        )
        assert fetched.path == path
        assert await growing.offer.released() is Outcome.COMPLETED


async def test_an_offer_that_was_opened_without_tables_gets_them_with_its_tokens(shapes, path):
    groups = (GROUP, WINDOW, STATE)
    async with two_engines(shapes, path, PREFILL, DECODE, groups=groups) as (source, target):
        theirs, ours = source.some_blocks(5, 71), target.some_blocks(6, 71)
        firsts = source.first_blocks(71)
        wanted = expected_after(
            target.snapshot(),
            source,
            theirs,
            target,
            ours,
            num_tokens=71,
            first_blocks=firsts,
        )
        offer = await source.prefill.offer("r", num_tokens=0, block_ids={}, sealed=False)
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=71, block_ids=ours, timeout_s=FETCH_TIMEOUT_S
        )

        await offer.extend(71, theirs, first_blocks=firsts)
        await offer.seal()
        await fetch.completed()

        assert same(target.snapshot(), wanted)


async def test_a_seal_that_brings_no_token_ends_the_fetch_and_zeroes_the_tail(shapes, path):
    async with two_engines(shapes, path, PREFILL, DECODE) as (source, target):
        growing = Growing(source, target, num_tokens=71, zero_tail=True)
        await growing.start()
        await growing.grow(71)
        await until(lambda: growing.has(71))

        await growing.offer.seal()
        fetched = await growing.fetch.completed()

        assert same(target.snapshot(), growing.wanted)
        assert fetched.path == path


async def test_chunks_that_come_faster_than_they_are_read_arrive_all_the_same(shapes, path):
    async with two_engines(shapes, path, PREFILL, DECODE) as (source, target):
        await hand_over(source, target, 95, steps=(0, 1, 2, 16, 17, 30, 31, 32, 64, 95))


async def test_a_fetch_may_want_less_than_a_growing_offer_has(shapes, path):
    async with two_engines(shapes, path, PREFILL, DECODE, groups=(GROUP, WINDOW)) as two:
        await hand_over(*two, 40, steps=(10, 39, 41), offered=80, zero_tail=True)


async def test_a_growing_offer_that_is_withdrawn_fails_its_fetch_and_writes_no_more(shapes, path):
    async with two_engines(shapes, path, PREFILL, DECODE) as (source, target):
        growing = Growing(source, target, num_tokens=71)
        await growing.start()
        await growing.grow(30)
        await until(lambda: growing.has(30))

        await growing.offer.withdraw()
        failure = await failure_of(growing.fetch)
        await growing.fetch.blocks_freed()
        outcome = await growing.offer.released()

        assert failure.code is ErrorCode.OFFER_WITHDRAWN
        assert outcome is Outcome.WITHDRAWN
        await hand_over(source, target, 71)


async def test_a_cancelled_fetch_of_a_growing_offer_leaves_it_to_another(shapes, path):
    async with two_engines(shapes, path, PREFILL, DECODE) as (source, target):
        growing = Growing(source, target, num_tokens=71)
        await growing.start()
        await growing.grow(30)
        await until(lambda: growing.has(30))

        await growing.fetch.cancel()
        failure = await failure_of(growing.fetch)
        await growing.fetch.blocks_freed()
        again = target.decode.fetch(growing.offer.ticket, num_tokens=71, block_ids=growing.ours)
        await growing.grow(71)
        await growing.offer.seal()
        await again.completed()

        assert failure.code is ErrorCode.CANCELLED
        assert same(target.snapshot(), growing.wanted)


async def test_a_sealed_offer_that_lacks_tokens_fails_the_fetch_that_read_some(shapes, path):
    async with two_engines(shapes, path, PREFILL, DECODE) as (source, target):
        growing = Growing(source, target, num_tokens=71)
        await growing.start()
        await growing.grow(30)
        await until(lambda: growing.has(30))

        await growing.offer.seal()
        failure = await failure_of(growing.fetch)
        await growing.offer.withdraw()

        assert "30" in str(failure)
        assert "71" in str(failure)
