"""Speculative reads: blocks of a ticket are read before the lease, and a commit confirms them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvbus.errors import ErrorCode, FetchFailed
from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import Engine, Handoff, begin, engine, failure_of, pair, same, works
from tests.support.late_links import LINKED, late_link, look_past_link

pytestmark = pytest.mark.anyio

NUM_TOKENS = 16 * 3 + 5


def how(decode: AgentProcess, handoff: Handoff) -> tuple[bool, bool]:
    (line,) = decode.says("handoff.completed", fetch_id=handoff.fetch.fetch_id)
    return line["speculative"], line["leased"]


@asynccontextmanager
async def two_readers(*agents: AgentProcess) -> AsyncIterator[tuple[Engine, Engine, Engine]]:
    prefill, decode, other_decode = agents
    async with (
        pair(prefill.attach, decode.attach) as (source, one),
        engine(other_decode.attach, seed=3) as other,
    ):
        for target in (one, other):
            assert await works(source, target)
        yield source, one, other


@pytest.mark.parametrize("fabric", ["shared memory", pytest.param("tcp", marks=pytest.mark.long)])
async def test_first_handoff_acquires_and_later_ones_are_speculative(
    fresh: Agents, fabric: str
) -> None:
    """Over TCP, reads need progress of the prefill agent: the acquire is sent beside them.

    Over shared memory only a slow one acquires.
    """
    env = {"UCX_TLS": "tcp"} if fabric == "tcp" else {}
    prefill, decode = fresh.both(decode={"path": "direct"}, env=env)
    async with pair(prefill.attach, decode.attach) as engines:
        ways = []
        for _ in range(10):
            handoff = await begin(*engines, NUM_TOKENS)
            await handoff.completed()
            ways.append(how(decode, handoff))
    assert [is_speculative for is_speculative, _ in ways] == [False] + 9 * [True]
    assert all(is_leased for _, is_leased in ways) == (fabric == "tcp")


async def test_offer_already_held_by_decode_is_committed_by_one_request(
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
async def test_fetch_that_is_not_speculative_acquires_and_completes(
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


async def test_one_of_two_speculative_readers_commits_the_offer(
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
    try:
        await handoff.fetch.ended
    except FetchFailed as failure:
        await handoff.fetch.freed
        return failure.code.value
    return ""


@pytest.mark.parametrize("ready", [None, NUM_TOKENS], ids=["sealed", "open"])
async def test_offer_for_two_readers_is_read_by_two_at_once(
    prefill: AgentProcess, decode: AgentProcess, other_decode: AgentProcess, ready: int | None
) -> None:
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


async def test_fetch_fails_if_offer_ends_between_last_byte_and_commit(fresh: Agents) -> None:
    prefill, decode = fresh.both(LINKED)
    codes = []
    async with late_link(prefill) as link, engine(decode.attach, seed=2) as target:
        for is_withdrawn in (True, False):
            async with engine(prefill.attach, seed=1) as source:
                assert await works(source, target)
                link.late = "commit"
                handoff = await begin(source, target, NUM_TOKENS)
                await until(handoff.has_landed)
                await until(lambda: link.is_holding)
                if is_withdrawn:
                    await handoff.offer.withdraw()
                    await handoff.offer.ended  # its blocks are overwritten by now
                else:
                    prefill.kill()
            if not is_withdrawn:
                prefill.start()
            link.heal()
            failure = await failure_of(handoff.fetch)
            codes.append(failure.code)
            assert failure.blocks_free
        look_past_link(prefill)
    assert codes == [ErrorCode.OFFER_WITHDRAWN, ErrorCode.OFFER_UNKNOWN]
