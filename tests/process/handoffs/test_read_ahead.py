"""Blocks that a ticket names are read before the lease; the prefill agent has the last word."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kvbus.errors import ErrorCode, FetchFailed
from tests.process.handoffs.tap import TAPPED, Tap, tapped
from tests.support.agents import AgentProcess, Agents, agents_ended, until
from tests.support.engines import Engine, Handoff, begin, engine, failure_of, pair, same, works

pytestmark = pytest.mark.anyio

NUM_TOKENS = 16 * 3 + 5


def how(decode: AgentProcess, handoff: Handoff) -> tuple[bool, bool]:
    """Whether it was read ahead, and whether there was a lease."""
    (line,) = decode.says("handoff.completed", fetch_id=handoff.fetch.fetch_id)
    return line["speculative"], line["leased"]


@asynccontextmanager
async def two_readers(*agents: AgentProcess) -> AsyncIterator[tuple[Engine, Engine, Engine]]:
    """A prefill engine, and two decode engines that have read of it."""
    prefill, decode, other_decode = agents
    async with (
        pair(prefill.attach, decode.attach) as (source, one),
        engine(other_decode.attach, seed=3) as other,
    ):
        for target in (one, other):
            assert await works(source, target)
        yield source, one, other


@pytest.mark.parametrize("fabric", ["shared memory", pytest.param("tcp", marks=pytest.mark.long)])
async def test_first_handoff_acquires_and_later_ones_read_ahead(fresh: Agents, fabric: str) -> None:
    """Where reads need the progress of the prefill agent, the acquire is made beside them.

    Over shared memory one that takes long acquires, too: one of them does not.
    """
    env = {"UCX_TLS": "tcp"} if fabric == "tcp" else {}
    prefill = fresh.prepare("prefill", env=env)
    decode = fresh.prepare("decode", env=env, path="direct")
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as engines:
        ways = []
        for _ in range(10):
            handoff = await begin(*engines, NUM_TOKENS)
            await handoff.completed()
            ways.append(how(decode, handoff))

    assert [is_ahead for is_ahead, _ in ways] == [False] + 9 * [True]
    assert all(is_leased for _, is_leased in ways) == (fabric == "tcp")


async def test_offer_already_held_by_decode_is_taken_by_one_request(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as engines:
        assert await works(*engines)
        handoff = await begin(*engines, 48, first_token=48)
        await handoff.completed()

    assert how(decode, handoff) == (True, False)


@pytest.mark.parametrize(
    ("settings", "fetched"),
    [
        ({"prefill": {"ticket_blocks": 2}}, {}),
        ({}, {"ready": NUM_TOKENS}),
        ({}, {"chunk_tokens": 16}),
    ],
    ids=["too many blocks", "open", "in chunks"],
)
async def test_fetch_without_read_ahead_acquires_first_and_completes(
    agents: Agents, fresh: Agents, settings: dict[str, Any], fetched: dict[str, Any]
) -> None:
    prefill, decode = agents.all[:2]
    for role, of_role in settings.items():
        other = fresh.prepare(role, **of_role)
        prefill, decode = (other, decode) if role == "prefill" else (prefill, other)
    fresh.start(*fresh.all)
    async with pair(prefill.attach, decode.attach) as engines:
        assert await works(*engines)
        handoff = await begin(*engines, NUM_TOKENS, **fetched)
        if "ready" in fetched:
            await handoff.offer.seal()
        await handoff.completed()

    assert how(decode, handoff) == (False, True)


async def test_one_of_two_decode_engines_gets_offer_both_read_ahead(
    prefill: AgentProcess, decode: AgentProcess, other_decode: AgentProcess
) -> None:
    async with two_readers(prefill, decode, other_decode) as (source, one, other):
        for _ in range(5):
            first = await begin(source, one, NUM_TOKENS)
            handoffs = [first, await begin(source, other, NUM_TOKENS, offer=first.offer)]
            ends = [await end_of(handoff) for handoff in handoffs]
            await first.offer.ended

            assert sorted(ends) == ["", ErrorCode.OFFER_COMPLETED.value]
            winner = handoffs[ends.index("")]
            assert same(winner.target.snapshot(), winner.wanted)


async def end_of(handoff: Handoff) -> str:
    """The code with which a fetch failed."""
    try:
        await handoff.fetch.ended
    except FetchFailed as failure:
        await handoff.fetch.freed
        return failure.code.value
    return ""


@pytest.mark.parametrize("ready", [None, NUM_TOKENS], ids=["sealed", "open"])
async def test_as_many_engines_read_an_offer_at_once_as_it_is_for(
    prefill: AgentProcess, decode: AgentProcess, other_decode: AgentProcess, ready: int | None
) -> None:
    """One that is open when they ask is acquired first, a sealed one is read by its ticket."""
    async with two_readers(prefill, decode, other_decode) as (source, one, other):
        first = await begin(source, one, NUM_TOKENS, ready=ready, made={"readers": 2})
        second = await begin(source, other, NUM_TOKENS, offer=first.offer)
        if ready:
            await until(lambda: prefill.status()["counts"]["leases"] == 2)
            await first.offer.seal()
        for handoff in (first, second):
            await handoff.completed()
        third = await begin(source, other, NUM_TOKENS, offer=first.offer)

        assert (await failure_of(third.fetch)).code is ErrorCode.OFFER_COMPLETED


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


@pytest.mark.parametrize(
    ("is_withdrawn", "codes"),
    [
        (True, {ErrorCode.OFFER_WITHDRAWN}),
        (False, {ErrorCode.OFFER_UNKNOWN}),
    ],
    ids=["withdrawn", "prefill agent is new"],
)
async def test_fetch_fails_if_offer_ends_between_last_byte_and_commit(
    questioned: tuple[AgentProcess, AgentProcess, Tap], is_withdrawn: bool, codes: set[ErrorCode]
) -> None:
    prefill, decode, tap = questioned
    async with engine(decode.attach, seed=2) as target:
        async with engine(prefill.attach, seed=1) as source:
            assert await works(source, target)
            tap.keep("commit")
            handoff = await begin(source, target, NUM_TOKENS)
            await until(handoff.has_landed)
            await anyio.to_thread.run_sync(tap.wait_kept)

            if is_withdrawn:
                await handoff.offer.withdraw()
                await handoff.offer.ended  # its blocks are overwritten by now
            else:
                prefill.kill()
        if not is_withdrawn:
            prefill.start()
        tap.let_through()
        failure = await failure_of(handoff.fetch)

    assert failure.code in codes
    assert failure.blocks_free
