"""The ways between an engine and its agent are in the spans, by the engine's own word.

Its clock is that of the agent; what cannot be true is ignored, and an engine need say nothing.
"""

import math
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from kvbus.bus.inbox import NoticeInbox
from kvbus.engine import BlockingDecode, BlockingMemory, BlockingPrefill
from kvbus.geometry import BlockTable
from kvbus.protocol import MakeOffer, StartFetch
from tests.agents import AgentProcess, until
from tests.engines import LARGE, NHD, NUM_LARGE_BLOCKS, make_spec, pair

pytestmark = pytest.mark.anyio

HOLD_S = 0.5
Spans = dict[str, dict[str, Any]]
Told = tuple[float, ...]


def parts(agent: AgentProcess, **asked: str) -> Spans:
    """What the time of a fetch or an offer went to, by name; its leases are beside that."""
    spans = agent.trace(**asked)
    return {one["name"]: one for one in spans if one["depth"] == 1 and one["name"] != "leased"}


def seconds(spans: Spans) -> float:
    return sum(one["end_s"] - one["start_s"] for one in spans.values())


async def told(agent: AgentProcess, **asked: str) -> Spans:
    """As `parts`, once the engine has said when it was told of the end."""
    await until(lambda: "telling" in parts(agent, **asked))
    return parts(agent, **asked)


def ways_are(expected: set[str], agent: AgentProcess, **asked: str) -> Callable[[], bool]:
    """Whether it has these ways alone; what an engine says of them comes after the end."""

    def looks() -> bool:
        names = parts(agent, **asked).keys()
        return names & {"asked", "telling"} == expected and len(names) > len(expected)

    return looks


async def test_spans_of_a_large_handoff_are_what_the_engine_measures(prefill, decode):
    num_tokens, blocks = NUM_LARGE_BLOCKS * LARGE.block_size, {"full": range(NUM_LARGE_BLOCKS)}
    shape = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
    async with pair(prefill.attach, decode.attach, **shape) as (source, target):
        offer = await source.prefill.offer("large", num_tokens=num_tokens, block_ids=blocks)
        began_at = time.monotonic()
        fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=blocks)
        await fetch.completed()
        ended_at = time.monotonic()
        spans = await told(decode, fetch_id=fetch.fetch_id)

    assert began_at <= spans["asked"]["start_s"]
    assert spans["telling"]["end_s"] <= ended_at
    assert 0.9 < seconds(spans) / (ended_at - began_at) <= 1.0


async def test_the_span_of_the_fetch_itself_begins_and_ends_with_those_of_the_ways(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("ways", num_tokens=16, block_ids={"full": [1]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        await fetch.completed()
        of_fetch = await told(decode, fetch_id=fetch.fetch_id)
        of_offer = await told(prefill, offer_id=offer.offer_id)
        roots = decode.trace(fetch_id=fetch.fetch_id)[0], prefill.trace(offer_id=offer.offer_id)[0]

    for spans, root in zip((of_fetch, of_offer), roots, strict=True):
        names = list(spans)
        assert (names[0], names[-1]) == ("asked", "telling")
        assert root["start_s"] == spans["asked"]["start_s"]
        assert root["end_s"] == spans["telling"]["end_s"]


@pytest.mark.parametrize("ago_s", [math.nan, math.inf, -math.inf, 1e6, -1e6])
async def test_an_engine_that_asked_at_no_time_that_can_be_has_no_ways(prefill, decode, ago_s):
    name = uuid.uuid4().hex
    tables = {"full": BlockTable.of([1])}, {"full": BlockTable.of([2])}
    async with pair(prefill.attach, decode.attach) as (source, target):
        asked_s = time.monotonic() - ago_s
        made = await source.prefill.request(MakeOffer(name, 16, tables[0], asked_s=asked_s))
        await target.decode.request(
            StartFetch(f"fetch-{name}", made.ticket, 16, tables[1], asked_s=asked_s)
        )
        await until(lambda: decode.logged("handoff.completed", request_id=name))

    of_fetch, of_offer = parts(decode, fetch_id=f"fetch-{name}"), parts(prefill, request_id=name)
    assert not {"asked", "telling"} & (of_fetch.keys() | of_offer.keys())
    assert {"reading", "confirming"} <= of_fetch.keys()


async def test_an_engine_that_does_not_say_when_it_asked_is_traced_from_then_on(prefill, decode):
    name = uuid.uuid4().hex
    tables = {"full": BlockTable.of([1])}, {"full": BlockTable.of([2])}
    async with pair(prefill.attach, decode.attach) as (source, target):
        made = await source.prefill.request(MakeOffer(name, 16, tables[0]))
        await target.decode.request(StartFetch(f"fetch-{name}", made.ticket, 16, tables[1]))
        of_fetch = await told(decode, fetch_id=f"fetch-{name}")
        of_offer = await told(prefill, offer_id=made.offer_id)

    assert "asked" not in of_fetch.keys() | of_offer.keys()
    assert {"reading", "confirming"} <= of_fetch.keys()


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (lambda _: (), {"asked"}),
        (lambda times: (math.nan,) * len(times), set()),
        (lambda times: tuple(at - 1e6 for at in times), set()),
        (lambda times: tuple(at + 1e6 for at in times), set()),
    ],
    ids=["nothing", "no number", "before the end", "in the future"],
)
async def test_an_engine_that_was_told_at_no_time_that_can_be_has_no_ways(
    prefill, decode, monkeypatch, says: Callable[[Told], Told], expected
):
    """One that says nothing of it has the way there."""
    take = NoticeInbox.take_told
    monkeypatch.setattr(NoticeInbox, "take_told", lambda inbox: says(take(inbox)))

    async with pair(prefill.attach, decode.attach) as (source, target):
        name = uuid.uuid4().hex
        offer = await source.prefill.offer(name, num_tokens=16, block_ids={"full": [1]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        await fetch.completed()
        await offer.released()

        await until(ways_are(expected, decode, fetch_id=fetch.fetch_id))
        await until(ways_are(expected, prefill, offer_id=offer.offer_id))


async def test_an_engine_that_leaves_at_once_has_said_when_it_was_told(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        name = uuid.uuid4().hex
        offer = await source.prefill.offer(name, num_tokens=16, block_ids={"full": [1]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        await fetch.completed()

    assert "telling" in parts(decode, fetch_id=fetch.fetch_id)


def test_a_blocking_engine_asks_when_it_calls_and_not_when_its_session_comes_to_it(prefill, decode):
    specs = [make_spec(), make_spec()]
    held_until: list[float] = []

    async def hold() -> None:
        time.sleep(HOLD_S)  # noqa: ASYNC251  the session's thread is to be busy
        held_until.append(time.monotonic())

    with (
        BlockingMemory(prefill.attach, specs[0], 0) as theirs,
        BlockingMemory(decode.attach, specs[1], 0) as ours,
        BlockingPrefill(prefill.attach, specs[0]) as source,
        BlockingDecode(decode.attach, specs[1]) as target,
    ):
        for memory in (theirs, ours):
            memory.allocate(NHD, num_blocks=4)
        for session in (source, target):
            session.register()
            session.ready()
        offer = source.offer("blocking", num_tokens=16, block_ids={"full": [1]})
        target.start(hold)
        began_at = time.monotonic()
        fetch = target.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        target.wait_completed(fetch)

    spans = parts(decode, fetch_id=fetch.fetch_id)
    assert began_at <= spans["asked"]["start_s"] < held_until[0] <= spans["asked"]["end_s"]
