"""One offer that several decode engines read, with real agents: its blocks wait for the last."""

import uuid

import anyio
import pytest

from kvbus.engine import DecodeSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import until
from tests.engines import engine, expected_after, failure_of, make_spec, pair, same

pytestmark = pytest.mark.anyio

NUM_TOKENS = 70


@pytest.mark.parametrize("sealed", [True, False])
async def test_engines_at_two_agents_read_an_offer_at_the_same_time(
    prefill, decode, other_decode, sealed
):
    """One that is open when they ask is claimed first, a sealed one is read by its ticket."""
    async with (
        pair(prefill.attach, decode.attach) as (source, one),
        engine(DecodeSession, other_decode.attach, make_spec(), seed=3) as other,
    ):
        theirs, readers = source.some_blocks(5, NUM_TOKENS), (one, other)
        ours = [each.some_blocks(6, NUM_TOKENS) for each in readers]
        wanted = [
            expected_after(each.snapshot(), source, theirs, each, blocks, num_tokens=NUM_TOKENS)
            for each, blocks in zip(readers, ours, strict=True)
        ]
        offer = await source.prefill.offer(
            uuid.uuid4().hex,
            num_tokens=NUM_TOKENS,
            block_ids=theirs,
            sealed=sealed,
            readers=2,
        )

        fetches = [
            each.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=blocks)
            for each, blocks in zip(readers, ours, strict=True)
        ]
        if not sealed:
            await until(lambda: prefill.status()["counts"]["leases"] == 2)
            await offer.seal()
        for fetch in fetches:
            await fetch.completed()

        assert await offer.released() is Outcome.COMPLETED
        assert same(one.snapshot(), wanted[0])
        assert same(other.snapshot(), wanted[1])


async def test_an_offer_is_read_again_elsewhere_and_no_oftener_than_it_may(
    prefill, decode, other_decode
):
    async with (
        pair(prefill.attach, decode.attach) as (source, one),
        engine(DecodeSession, other_decode.attach, make_spec(), seed=3) as other,
    ):
        theirs, ours = source.some_blocks(5, NUM_TOKENS), other.some_blocks(6, NUM_TOKENS)
        offer = await source.prefill.offer(
            uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs, readers=2
        )
        first = one.some_blocks(6, NUM_TOKENS)
        await one.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=first).completed()
        wanted = expected_after(
            other.snapshot(), source, theirs, other, ours, num_tokens=NUM_TOKENS
        )

        again = other.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours)
        await again.completed()
        await offer.released()
        has_it = same(other.snapshot(), wanted)
        third = other.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours)

        assert (await failure_of(third)).code is ErrorCode.OFFER_COMPLETED
        assert has_it


async def test_blocks_that_fewer_read_than_might_come_back_after_the_time_to_live(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer(
            uuid.uuid4().hex,
            num_tokens=NUM_TOKENS,
            block_ids=source.some_blocks(5, NUM_TOKENS),
            readers=3,
            ttl_s=2.0,
        )
        ours = target.some_blocks(6, NUM_TOKENS)

        await target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours).completed()

        with anyio.fail_after(30):
            assert await offer.released() is Outcome.COMPLETED
