"""Blocks that a ticket names are read before the lease; the prefill agent has the last word."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.engines import Engine, Snapshot, engine, failure_of, make_spec, pair, same, works
from tests.expected import expected_after
from tests.process.tap import TAPPED, Tap, tapped

pytestmark = pytest.mark.anyio

NUM_TOKENS = 16 * 3 + 5


@dataclass
class Handoff:
    """One that has begun; ``wanted`` is what must be in the decode engine's memory in its end."""

    offer: Offer
    fetch: Fetch
    wanted: Snapshot
    target: Engine

    async def completed(self, outcome: Outcome = Outcome.COMPLETED) -> bool:
        """Whether it ends well, with the right bytes."""
        await self.fetch.completed()
        is_right = same(self.target.snapshot(), self.wanted)
        return await self.offer.released() is outcome and is_right


async def start(
    source: Engine,
    target: Engine,
    *,
    num_tokens: int = NUM_TOKENS,
    first_token: int = 0,
    offer: Offer | None = None,
    **more: Any,
) -> Handoff:
    """Begin one, of a given offer or of another."""
    tokens: dict[str, Any] = {"num_tokens": num_tokens, "first_token": first_token}
    theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens, first_token)
    wanted = expected_after(target.snapshot(), source, theirs, target, ours, **tokens)
    offer = offer or await source.prefill.offer(
        uuid.uuid4().hex, num_tokens=num_tokens, block_ids=theirs
    )
    fetch = target.decode.fetch(offer.ticket, block_ids=ours, **tokens, **more)
    return Handoff(offer, fetch, wanted, target)


def how(decode: AgentProcess, handoff: Handoff) -> tuple[bool, bool]:
    """Whether it was read ahead, and whether there was a lease."""
    (line,) = decode.says("handoff.completed", fetch_id=handoff.fetch.fetch_id)
    return line["ahead"], line["leased"]


@pytest.mark.parametrize("fabric", ["shared memory", pytest.param("tcp", marks=pytest.mark.long)])
async def test_the_first_handoff_of_two_engines_claims_and_the_next_ones_read_ahead(
    fresh: Agents, fabric: str
) -> None:
    """Where reads need the progress of the prefill agent, the claim is made beside them."""
    env = {"UCX_TLS": "tcp"} if fabric == "tcp" else {}
    prefill = fresh.prepare("prefill", env=env)
    decode = fresh.prepare("decode", env=env, path="direct")
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        ways = []
        for _ in range(3):
            handoff = await start(source, target)
            assert await handoff.completed()
            ways.append(how(decode, handoff))

    assert [is_ahead for is_ahead, _ in ways] == [False, True, True]
    assert fabric != "tcp" or all(is_leased for _, is_leased in ways)


async def test_an_offer_that_the_decode_engine_has_already_is_taken_by_one_request(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)

        handoff = await start(source, target, num_tokens=48, first_token=48)

        assert await handoff.completed()
    assert how(decode, handoff) == (True, False)


@pytest.mark.parametrize("closed", ["too many blocks", "optimistic = false", "open", "in chunks"])
async def test_a_fetch_that_cannot_be_read_ahead_claims_first_and_is_as_good(
    prefill: AgentProcess, decode: AgentProcess, fresh: Agents, closed: str
) -> None:
    if closed == "too many blocks":
        prefill = fresh.prepare("prefill", ticket_blocks=2)
    if closed == "optimistic = false":
        decode = fresh.prepare("decode", optimistic=False)
    fresh.start(*fresh.all)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        theirs = source.some_blocks(5, NUM_TOKENS)
        is_open = closed == "open"
        offer = await source.prefill.offer(
            "r", num_tokens=NUM_TOKENS, block_ids=theirs, sealed=not is_open
        )
        chunks = {"piece_tokens": 16} if closed == "in chunks" else {}

        handoff = await start(source, target, offer=offer, **chunks)
        if is_open:
            await offer.seal()

        assert await handoff.completed()
    assert how(decode, handoff) == (False, True)


async def test_of_two_decode_engines_that_read_one_offer_ahead_one_has_it(
    prefill: AgentProcess, decode: AgentProcess, other_decode: AgentProcess
) -> None:
    async with (
        pair(prefill.attach, decode.attach) as (source, one),
        engine(DecodeSession, other_decode.attach, seed=3) as other,
    ):
        for target in (one, other):
            assert await works(source, target)
        for _ in range(5):
            offer = await source.prefill.offer(
                uuid.uuid4().hex,
                num_tokens=NUM_TOKENS,
                block_ids=source.some_blocks(5, NUM_TOKENS),
            )
            handoffs = [await start(source, each, offer=offer) for each in (one, other)]
            ends = [await end_of(handoff.fetch) for handoff in handoffs]
            await offer.released()

            assert sorted(ends) == ["", ErrorCode.OFFER_COMPLETED.value]
            winner = handoffs[ends.index("")]
            assert same(winner.target.snapshot(), winner.wanted)


async def end_of(fetch: Fetch) -> str:
    """The code with which it failed."""
    try:
        await fetch.completed()
    except FetchFailed as failure:
        if not failure.blocks_free:
            await fetch.blocks_freed()
        return failure.code.value
    return ""


@pytest.mark.parametrize("sealed", [True, False])
async def test_as_many_engines_read_an_offer_at_once_as_it_is_for(
    prefill: AgentProcess, decode: AgentProcess, other_decode: AgentProcess, sealed: bool
) -> None:
    """One that is open when they ask is claimed first, a sealed one is read by its ticket."""
    async with (
        pair(prefill.attach, decode.attach) as (source, one),
        engine(DecodeSession, other_decode.attach, make_spec(), seed=3) as other,
    ):
        offer = await source.prefill.offer(
            uuid.uuid4().hex,
            num_tokens=NUM_TOKENS,
            block_ids=source.some_blocks(5, NUM_TOKENS),
            sealed=sealed,
            readers=2,
        )

        handoffs = [await start(source, each, offer=offer) for each in (one, other)]
        if not sealed:
            await until(lambda: prefill.status()["counts"]["leases"] == 2)
            await offer.seal()
        for handoff in handoffs:
            assert await handoff.completed()
        third = await start(source, other, offer=offer)

        assert (await failure_of(third.fetch)).code is ErrorCode.OFFER_COMPLETED


async def test_blocks_that_fewer_read_than_might_come_back_after_the_time_to_live(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        theirs = source.some_blocks(5, NUM_TOKENS)
        offer = await source.prefill.offer(
            uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs, readers=3, ttl_s=2.0
        )

        handoff = await start(source, target, offer=offer)

        with anyio.fail_after(60):
            assert await handoff.completed()


@pytest.fixture
def questioned() -> Iterator[tuple[AgentProcess, AgentProcess, Tap]]:
    """A prefill and a decode agent, and what is between them."""
    with agents_ended(Agents) as agents:
        prefill, decode = agents.prepare("prefill", **TAPPED), agents.prepare("decode")
        with tapped(prefill) as tap:
            agents.start(prefill, decode)
            yield prefill, decode, tap
            prefill.started["peer"] = prefill.settings["peer_bind"]
            agents.check()


@pytest.mark.parametrize("is_withdrawn", [True, False], ids=["withdrawn", "prefill agent is new"])
async def test_an_offer_that_ends_between_the_last_byte_and_the_yes_fails(
    questioned: tuple[AgentProcess, AgentProcess, Tap], is_withdrawn: bool
) -> None:
    prefill, decode, tap = questioned
    async with engine(DecodeSession, decode.attach, seed=2) as target:
        async with engine(PrefillSession, prefill.attach, seed=1) as source:
            assert await works(source, target)
            tap.keep("take")
            tap.keep("confirm")
            handoff = await start(source, target)
            await until(lambda: same(target.memories(), handoff.wanted))
            await anyio.to_thread.run_sync(tap.wait_kept)

            if is_withdrawn:
                await handoff.offer.withdraw()
                await handoff.offer.released()  # its blocks are overwritten by now
                tap.let_through()
                failure = await failure_of(handoff.fetch)
            else:
                prefill.kill()
        if not is_withdrawn:
            prefill.start()
            tap.let_through()
            failure = await failure_of(handoff.fetch)

    assert (
        failure.code
        in {
            True: {ErrorCode.OFFER_WITHDRAWN},
            False: {ErrorCode.PEER_LOST, ErrorCode.STALE},
        }[is_withdrawn]
    )
    assert failure.blocks_free
