"""Requests of the SDK: tables, refusals, and agents that are busy, drain, or are gone."""

import contextlib
import gc
import math
import time
import weakref
from functools import partial
from itertools import pairwise
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from kvbus import errors, protocol
from kvbus.engine import EndedQueue, Fetch, Offer
from kvbus.engine.retrying import SILENT_S
from kvbus.errors import ErrorCode, KVBusError, PeerLost, RequestRefused, RequestTimeout
from kvbus.geometry import BlockTable
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import BlocksFreed, Outcome, Released, StartFetch
from tests.support.agents import until
from tests.support.engines import failure_of
from tests.unit.engine import recording
from tests.unit.engine.recording import RecordedFetches, RecordedOffers, Recording, busy, failed
from tests.unit.prefill.tickets import ticket_for

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(40)]

HINT_S = 0.05
TIMEOUT_S = 0.2
WITHIN_S = 30.0
GONE, CLOSED = PeerLost("the agent is gone"), errors.ClosedError("the session was closed")
HUNG_UP = errors.AgentHungUp("the agent hung up, and lives on")
DRAINS, FREE, LATE = False, True, "late"  # how the home agent reports the blocks of a failed fetch


def tables_of(block_ids: dict[str, Any], **tokens: Any) -> dict[str, BlockTable]:
    return RecordedFetches().new({}, block_ids=block_ids, **tokens).message.tables


ALL = {"full": [7, 3, 9], "window": [5, 1, 2], "state": [4]}


def test_groups_may_be_left_out_and_all_if_nothing_is_wanted() -> None:
    some = tables_of({"full": [7, 3, 9], "state": [4]}, num_tokens=40)
    assert some == {"full": BlockTable.of([7, 3, 9]), "state": BlockTable.of([4])}
    nothing: list[dict[str, Any]] = [{}, {name: [] for name in ALL}]
    for ids in nothing:
        none = tables_of(ids, num_tokens=40, first_token=40)
        assert list(map(len, none.values())) == [0, 0, 0]


@pytest.mark.parametrize(
    "block_ids", [{"full2": [1]}, *({"full": ids} for ids in ([-1], [2**32], [0.5], [[1, 2]]))]
)
def test_unknown_groups_and_wrong_ids_are_refused_before_sending(block_ids: Any) -> None:
    with pytest.raises(errors.GeometryError):
        tables_of({name: np.array(ids) for name, ids in block_ids.items()}, num_tokens=16)


@given(st.data())
def test_fetch_tables_cover_exactly_positions_of_their_group(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(0, 100))
    first_token = data.draw(st.integers(0, num_tokens))
    first = {
        "full": first_token,
        "window": max(first_token, num_tokens - (recording.WINDOW.window or 0)),
    }
    blocks = {
        group.name: sorted({at // group.block_size for at in range(first[group.name], num_tokens)})
        for group in (recording.FULL, recording.WINDOW)
    } | {"state": [0] if num_tokens > first_token else []}
    tables = tables_of(blocks, num_tokens=num_tokens, first_token=first_token)
    for name, numbers in blocks.items():
        table = tables[name]
        assert table.array().tolist() == numbers
        assert [table.first_block + i for i in range(len(table))] == numbers
    assert set(blocks) == {group.name for group in recording.SPEC.groups}


async def test_extensions_continue_each_table_even_one_starting_late() -> None:
    connection, of = Recording(), BlockTable.of
    offers = RecordedOffers(connection)
    offer = await offers.offer(40, ALL, first_blocks={"window": 7}, sealed=False)
    await offer.extend(52, {"full": [8], "window": [6, 0]})
    await offer.extend(60, {"window": [3, 4]})
    assert [message.tables for message in connection.sent] == [
        {"full": of([7, 3, 9]), "window": of([5, 1, 2], first_block=7), "state": of([4])},
        {"full": of([8], first_block=3), "window": of([6, 0], first_block=10)},
        {"window": of([3, 4], first_block=12)},
    ]


async def test_offer_made_after_its_caller_was_cancelled_is_kept() -> None:
    connection = Recording(reply=None)
    offer = RecordedOffers(connection).offer(16, {"full": [7]})
    with anyio.move_on_after(0):
        await offer
    connection.on_replies[0](recording.MADE)
    connection.notice(Released(recording.MADE.offer_id, "r", Outcome.EXPIRED))
    assert offer.offer_id == "offer-1"
    assert await offer.ended is Outcome.EXPIRED


@pytest.mark.parametrize("hint_s", [None, HINT_S, math.nan, -1.0, 0.0])
async def test_busy_fetch_is_asked_again_as_same_with_time_left(hint_s: float | None) -> None:
    connection, began = Recording(reply=None), time.monotonic()
    fetch = RecordedFetches(connection).fetch(timeout_s=30.0)
    connection.on_replies[0](busy() if hint_s is None else busy(retry_after_s=hint_s))
    assert len(connection.sent) == 1
    await until(lambda: len(connection.sent) == 2)
    passed_s = time.monotonic() - began
    first, second = connection.sent
    least_s = HINT_S if hint_s == HINT_S else 0.0
    assert (second.fetch_id, second.sent_s) == (first.fetch_id, first.sent_s)
    assert passed_s >= least_s
    assert second.timeout_s <= 30.0 - least_s
    assert fetch.notice is None


NO_TIME, NEVER = busy(retry_after_s=31.0), busy(retry_after_s=math.inf)
INVALID = RequestRefused("no", code=ErrorCode.INVALID)


@pytest.mark.parametrize("error", [NO_TIME, NEVER, INVALID, RequestTimeout("no reply")], ids=repr)
async def test_what_need_not_be_asked_again_fails_at_once(error: KVBusError) -> None:
    connection = Recording(reply=None)
    fetch = RecordedFetches(connection).fetch(timeout_s=30.0)
    connection.on_replies[0](error)
    failure = await failure_of(fetch)
    assert failure.code == error.code
    assert failure.blocks_free is isinstance(error, RequestRefused), "else it may know of it"
    assert len(connection.sent) == 1


async def test_fetch_cancelled_while_waiting_is_not_asked_again() -> None:
    connection = Recording(reply=None)
    fetches = RecordedFetches(connection)
    fetch = fetches.fetch()
    connection.on_replies[0](busy(retry_after_s=HINT_S))
    for _ in range(2):
        await fetch.cancel()
    failure = await failure_of(fetch)
    other = fetches.fetch()
    connection.on_replies[1](busy(retry_after_s=3 * HINT_S))
    await until(lambda: len(connection.sent) == 3)
    assert (failure.code, failure.stage) == (ErrorCode.CANCELLED, "requested")
    assert failure.blocks_free
    assert {message.fetch_id for message in connection.sent[1:]} == {other.fetch_id}


async def test_an_offer_waits_for_room_unless_its_agent_is_gone() -> None:
    connection = Recording(reply=None)
    offers = RecordedOffers(connection, agent_wait_s=HINT_S)
    waits, lost = offers.offer(), offers.offer()
    connection.on_replies[0](busy(retry_after_s=HINT_S))
    connection.on_replies[1](busy(retry_after_s=14.0))
    await until(lambda: len(connection.sent) == 3)
    connection.on_replies[2](recording.MADE)
    assert (await waits).offer_id == recording.MADE.offer_id
    connection.lose(GONE)
    with pytest.raises(PeerLost):
        await lost


def fetching(has_remote_ranks: bool) -> tuple[Recording, Fetch]:
    connection = Recording()
    fetches = RecordedFetches(connection, has_remote_ranks=has_remote_ranks)
    return connection, fetches.fetch(timeout_s=TIMEOUT_S)


# fmt: off
ENDS = [
    (False, [], GONE, "lost", True), (False, [], CLOSED, "lost", False),
    (True, [], GONE, "lost", False), (True, [], CLOSED, "lost", False),
    (False, [DRAINS], CLOSED, "reading", False), (True, [DRAINS], GONE, "reading", False),
    (True, [DRAINS], CLOSED, "reading", False), (True, [FREE], GONE, "reading", True),
    (True, [DRAINS, LATE], GONE, "reading", True),
]
# fmt: on


@pytest.mark.parametrize(("has_remote_ranks", "notices", "error", "stage", "blocks_free"), ENDS)
async def test_blocks_open_to_late_writes_are_never_reported_free(
    has_remote_ranks: bool, notices: list[Any], error: KVBusError, stage: str, blocks_free: bool
) -> None:
    connection, fetch = fetching(has_remote_ranks)
    for notice in notices:
        if notice is LATE:
            connection.notice(BlocksFreed(fetch.fetch_id))
        else:
            connection.answer(failed(fetch.fetch_id, blocks_free=notice))
    connection.lose(error)
    failure = await failure_of(fetch)
    assert (failure.stage, failure.blocks_free) == (stage, blocks_free and LATE not in notices)
    if blocks_free:
        await fetch.freed
    else:
        with pytest.raises(type(error)):
            await fetch.freed


async def test_report_between_end_of_writes_and_note_is_only_one() -> None:
    connection, queue = Recording(), EndedQueue[Fetch]()
    fetches = RecordedFetches(connection)
    fetch = fetches.fetch()
    reported: list[Fetch] = []
    fetches.state_of[fetch].on_end = lambda: queue.note(fetch)
    fetch.freed.then(lambda: reported.extend(queue.take()))
    connection.answer(failed(fetch.fetch_id, blocks_free=False))
    connection.notice(BlocksFreed(fetch.fetch_id))
    assert (reported, queue.take(), fetch.are_blocks_free) == ([fetch], [], True)


@pytest.mark.parametrize("how", ["draining", "unanswered", "lost"])
async def test_fetch_not_begun_by_its_agent_goes_on_with_next_agent(how: str) -> None:
    old, new = Recording(), Recording()
    fetches = RecordedFetches(old)
    if how == "lost":
        old.lose(GONE)
    fetch = fetches.fetch()
    if how == "draining":
        old.on_replies[0](recording.draining())
    if how != "lost":
        old.lose(GONE)
    fetches.opened(new)
    new.answer(failed(fetch.fetch_id, blocks_free=True))
    assert [one.fetch_id for one in new.sent] == [fetch.fetch_id]
    assert fetch.notice == failed(fetch.fetch_id, blocks_free=True)


@pytest.mark.parametrize("num_lost", [1, 3])
async def test_fetch_is_repeated_once_all_agent_processes_have_ended(num_lost: int) -> None:
    connections = [Recording() for _ in range(num_lost + 1)]
    fetches = RecordedFetches(connections[0])
    fetch = fetches.fetch(timeout_s=WITHIN_S)
    sent_early = []
    for lost, following in pairwise(connections):
        lost.lose(HUNG_UP)
        fetches.opened(following)
        sent_early += following.sent
        lost.life.end()
    connections[-1].answer(recording.completed(fetch.fetch_id))
    asked = [one for connection in connections for one in connection.sent]
    assert sent_early == []
    assert [one.repeated for one in asked] == list(range(num_lost + 1))
    assert {(one.fetch_id, one.token) for one in asked} == {(fetch.fetch_id, asked[0].token)}
    assert [one.timeout_s for one in asked] == sorted((o.timeout_s for o in asked), reverse=True)
    assert (await fetch.ended).outcome is Outcome.COMPLETED
    assert fetch.are_blocks_free


@pytest.mark.parametrize("code", [ErrorCode.CANCELLED, ErrorCode.PEER_LOST])
async def test_fetch_ended_without_agent_frees_blocks_after_processes(code: ErrorCode) -> None:
    lost, following = Recording(), Recording()
    fetches, is_cancelled = RecordedFetches(lost), code is ErrorCode.CANCELLED
    fetch = fetches.fetch(timeout_s=WITHIN_S if is_cancelled else TIMEOUT_S)
    lost.lose(HUNG_UP)
    fetches.opened(following)
    if is_cancelled:
        await fetch.cancel()
    failure = await failure_of(fetch)
    assert not fetch.freed.done()
    lost.life.end()
    await fetch.freed
    assert (failure.stage, failure.code, failure.blocks_free) == ("lost", code, False)
    assert following.sent == []


async def test_blocks_are_in_doubt_if_link_closes_while_process_lives() -> None:
    connection = Recording()
    fetches = RecordedFetches(connection)
    fetch = fetches.fetch()
    connection.lose(HUNG_UP)
    fetches.closed()
    assert not (await failure_of(fetch)).blocks_free
    with pytest.raises(errors.ClosedError):
        await fetch.freed


async def test_repeated_fetch_waits_for_room_and_for_next_agent() -> None:
    lost, full, ending, last = (Recording() for _ in range(4))
    fetches = RecordedFetches(lost)
    fetch = fetches.fetch(timeout_s=WITHIN_S)
    lost.lose(GONE)
    fetches.opened(full)
    full.on_replies[0](busy(retry_after_s=HINT_S))
    await until(lambda: len(full.sent) == 2)
    full.lose(GONE)
    fetches.opened(ending)
    ending.on_replies[0](recording.draining())
    fetches.opened(last)
    asked = [*full.sent, *ending.sent, *last.sent]
    assert [one.repeated for one in asked] == [1, 1, 2, 2]
    assert fetch.notice is None


@pytest.mark.parametrize("how", ["cancelled", "no next agent", "closed"])
async def test_fetch_waiting_for_next_agent_ends_once_with_free_blocks(how: str) -> None:
    connection = Recording()
    agent_wait_s = 0.01 if how == "no next agent" else WITHIN_S
    fetches = RecordedFetches(connection, agent_wait_s=agent_wait_s)
    fetch = fetches.fetch()
    connection.on_replies[0](recording.draining())
    if how == "cancelled":
        await fetch.cancel()
    elif how == "closed":
        connection.lose(CLOSED)
        fetches.closed()
    await fetch.freed
    ended = fetch.notice
    assert ended is not None
    assert ended.blocks_free
    cancelled = "cancelled", "cancelled"
    assert (ended.outcome, ended.code) == (
        cancelled if how == "cancelled" else ("failed", "draining")
    )


async def test_an_agent_that_was_lost_long_ago_is_not_waited_for() -> None:
    connection = Recording()
    fetches = RecordedFetches(connection, agent_wait_s=HINT_S)
    connection.lose(GONE)
    early = fetches.fetch()
    assert early.notice is None
    await early.freed
    for fetch in (early, fetches.fetch()):
        assert fetch.notice is not None
        assert fetch.notice.code == ErrorCode.PEER_LOST


@pytest.mark.parametrize("how", ["draining", "lost"])
async def test_offer_not_made_by_its_agent_is_made_by_next_agent(how: str) -> None:
    first, second = Recording(reply=None), Recording()
    offers = RecordedOffers(first)
    offer = offers.offer()
    if how == "draining":
        first.on_replies[0](recording.draining())
    first.lose(GONE)
    offers.opened(second)
    assert (await offer).offer_id == recording.MADE.offer_id
    assert [one.request_id for one in (*first.sent, *second.sent)] == ["r", "r"]


async def made_at(connection: Recording, **asked: Any) -> tuple[RecordedOffers, Offer]:
    """An offer that the agent of ``connection`` has, and its reply to what follows is lost."""
    offers = RecordedOffers(connection, agent_wait_s=HINT_S)
    offer = await offers.offer(16, {"full": [7]}, sealed=False, **asked)
    connection.reply = None
    return offers, offer


async def test_offer_is_published_again_in_current_state_and_goes_on() -> None:
    first, second = Recording(), Recording()
    offers, offer = await made_at(first, ttl_s=60.0)
    lost = offer.extend(32, {"full": [3]})
    first.lose(GONE)
    calls = [lost, offer.extend(48, {"full": [9]}), offer.seal()]
    ticket = offer.ticket
    await checkpoint()
    assert len(first.sent) == 2
    offers.opened(second)
    for one in (*calls, offer.withdraw()):
        await one
    second.notice(Released(offer.offer_id, "r", Outcome.WITHDRAWN))
    made, again = first.sent[0], second.sent[0]
    assert (again.offer_id, again.secret) == (made.offer_id, made.secret)
    assert (again.num_tokens, again.sealed, again.cell) == (48, True, 0)
    assert again.tables == {"full": BlockTable.of([7, 3, 9])}
    assert 50.0 < again.left_s <= 120.0
    assert offer.ticket == ticket
    assert [one.op for one in second.sent[1:]] == ["withdraw"]
    assert await offer.ended is Outcome.WITHDRAWN


@pytest.mark.parametrize("then", ["made", "refused", "lost"])
async def test_offer_next_agent_may_have_ends_only_when_this_is_known(then: str) -> None:
    """Its reader may get a yes there, for bytes that must not be written until then."""
    first, second, third = Recording(), Recording(reply=None), Recording()
    offers, offer = await made_at(first)
    first.lose(GONE)
    offers.opened(second)
    offer.withdraw()
    await anyio.sleep(2 * HINT_S)
    ended_early = offer.ended.done()
    if then == "made":
        second.on_replies[0](recording.MADE)
        second.notice(Released(recording.MADE.offer_id, "r", Outcome.WITHDRAWN))
    elif then == "refused":
        second.on_replies[0](RequestRefused("no", code=ErrorCode.GEOMETRY))
    else:
        second.lose(GONE)
    await until(offer.ended.done)
    offers.opened(third)
    assert not ended_early
    assert third.sent == []


@pytest.mark.parametrize("how", ["withdrawn", "expired", "replaced"])
async def test_offer_without_agent_expires_after_ttl_and_agent_wait(how: str) -> None:
    """A withdrawal or replaced memory ends it at once."""
    first, second = Recording(), Recording()
    offers, offer = await made_at(first)
    offers.check_memory("one")
    if how == "expired":
        offers.state_of[offer].expires_at = 0.0
    first.lose(GONE)
    offers.check_memory("one")
    assert not offer.ended.done()
    if how == "withdrawn":
        await offer.withdraw()
    elif how == "replaced":
        offers.check_memory("another")
    assert offer.ended.done() is (how != "expired")
    if how == "replaced":
        with pytest.raises(errors.LocalError, match="other memory"):
            await offer.ended
    else:
        assert await offer.ended == how
    offers.opened(second)
    assert second.sent == []


@pytest.mark.parametrize("is_committed", [True, False])
async def test_commit_unreported_by_lost_agent_is_found_in_cell(is_committed: bool) -> None:
    """The next agent is notified of it, and does not offer it; without one no reader commits."""
    first, second = Recording(reply=None), Recording()
    with contextlib.closing(SharedSegment(protocol.CELLS_BYTES)) as page:
        offers = RecordedOffers(first, cells=page)
        offer = offers.offer(16, {"full": [7]})
        asked = first.sent[0]
        ticket = ticket_for(asked, asked.offer_id, asked.secret)
        cell = protocol.CommitCell(page.swap, msgspec.structs.replace(ticket, cell=asked.cell))
        cell.open(asked.cell)
        first.on_replies[0](protocol.OfferMade(asked.offer_id, ticket.to_json()))
        assert not is_committed or cell.commit("a token")
        first.lose(GONE)
        if not is_committed:
            assert not cell.commit("a token")
            await offer.withdraw()
            return
        assert offer.outcome is Outcome.COMPLETED
        offers.opened(second)
        assert second.sent == []
        (ended,) = offers.ended_lately()
        assert (ended.offer_id, ended.secret) == (asked.offer_id, asked.secret)
        assert ended.commits == (protocol.commit_mark(asked.secret or "", "a token"),)


async def test_call_of_offer_ended_before_agent_loss_does_not_fail() -> None:
    first = Recording(reply=None)
    offers = RecordedOffers(first)
    offer = offers.offer(16, {"full": [7]})
    asked = first.sent[0]
    first.on_replies[0](protocol.OfferMade(asked.offer_id, {}))
    withdrawn = offer.withdraw()
    first.notice(Released(asked.offer_id, "r", Outcome.COMPLETED))
    first.lose(GONE)
    await withdrawn
    assert offer.outcome is Outcome.COMPLETED


async def test_ended_and_reported_offer_and_fetch_are_freed_without_gc() -> None:
    offers_at, fetches_at = Recording(), Recording()
    offers, fetches = RecordedOffers(offers_at), RecordedFetches(fetches_at)
    offer, fetch = await offers.offer(), fetches.fetch()
    gone: list[weakref.ref[Any]] = [weakref.ref(offer), weakref.ref(fetch)]
    heard: list[object] = []
    gc.disable()
    try:
        offer.ended.add_callback(partial(heard.append, offer.request_id))
        offer.ended.add_callback(offer.seal)
        fetch.ended.add_callback(partial(fetch.cancel, release_offer=False))
        offers_at.notice(Released(recording.MADE.offer_id, "r", Outcome.COMPLETED))
        fetches_at.answer(failed(fetch.fetch_id, blocks_free=True))
        for connection in (offers_at, fetches_at):
            connection.on_replies.clear()
        del offer, fetch
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()
    assert heard == ["r"]


@pytest.mark.parametrize("then", ["made", "refused", "gone"])
async def test_offer_stopped_agent_may_make_yet_fails_before_it_ends(then: str) -> None:
    stopped, following = Recording(reply=None), Recording()
    offers = RecordedOffers(stopped)
    offer = offers.offer()
    offers.state_of[offer].retry_until = 0.0
    seals = offer.seal()
    for _ in range(2):
        offers.on_silence(SILENT_S)
    for later in (offer.made, seals):
        with pytest.raises(RequestTimeout):
            await later
    had_ended = offer.ended.done()
    if then == "made":
        stopped.on_replies[0](recording.MADE)
        stopped.notice(Released(recording.MADE.offer_id, "r", Outcome.WITHDRAWN))
    elif then == "refused":
        stopped.on_replies[0](recording.draining())
    stopped.lose(GONE)
    offers.opened(following)
    assert not had_ended
    assert offer.ended.done()
    assert [message.op for message in stopped.sent[1:]] == ["withdraw"] * (then == "made")
    assert not following.sent


@pytest.mark.parametrize("is_closed", [False, True], ids=["before the first agent", "closed"])
async def test_without_a_next_agent_what_is_asked_fails_at_once(is_closed: bool) -> None:
    offers, fetches = RecordedOffers(), RecordedFetches()
    if is_closed:
        for calls in (offers, fetches):
            connection = Recording()
            calls.opened(connection)
            connection.lose(CLOSED)
            calls.closed()
    offer, fetch = offers.offer(), fetches.fetch()
    assert isinstance(offer.ended.exception(), errors.ClosedError)
    assert fetch.notice is not None
    assert (fetch.notice.code, fetch.are_blocks_free) == (ErrorCode.CLOSED, True)


@pytest.mark.parametrize("is_completed", [False, True])
async def test_fetch_cancelled_at_gone_agent_is_released_by_next_agent(is_completed: bool) -> None:
    old, new = Recording(), Recording()
    fetches, ticket = RecordedFetches(old), {"request_id": "r", "num_tokens": 3}
    fetch = fetches.fetch(ticket=ticket)
    if is_completed:
        old.answer(recording.completed(fetch.fetch_id))
    old.lose(GONE)
    await fetch.cancel(release_offer=True)
    await fetch.freed
    fetches.opened(new)
    sent = [(one.ticket, one.first_token, one.num_tokens) for one in new.sent]
    assert sent == ([] if is_completed else [(ticket, 3, 3)])


@pytest.mark.parametrize("release", [False, True])
async def test_cancelled_fetch_refused_by_busy_agent_is_not_sent_again(release: bool) -> None:
    connection = Recording(reply=None)
    fetch = RecordedFetches(connection).fetch(ticket={"offer_id": "o"})
    cancelled = fetch.cancel(release_offer=release)
    start, cancel = connection.on_replies

    start(busy())
    cancel(RequestRefused("no fetch", code=ErrorCode.FETCH_UNKNOWN))
    await cancelled
    await anyio.sleep(0.1)

    assert fetch.notice is not None
    assert (fetch.notice.outcome, fetch.are_blocks_free) == ("cancelled", True)
    again = [one for one in connection.sent[2:] if isinstance(one, StartFetch)]
    assert [one.fetch_id == fetch.fetch_id for one in again] == release * [False]


@pytest.mark.parametrize("others", [False, True])
async def test_cancelled_fetch_of_lost_agent_is_not_repeated(others: bool) -> None:
    first, second = Recording(reply=None), Recording()
    fetches = RecordedFetches(first, has_remote_ranks=others)
    fetch = fetches.fetch()
    fetch.cancel()

    first.lose(GONE)
    fetches.opened(second)

    assert fetch.notice is not None
    assert (fetch.notice.outcome, fetch.notice.stage) == ("cancelled", "lost")
    assert fetch.are_blocks_free != others
    assert second.sent == []


@pytest.mark.parametrize("is_followed", [False, True])
async def test_cancelled_fetch_of_lost_agent_ends_without_next_agent(is_followed: bool) -> None:
    connection = Recording(reply=None)
    fetches = RecordedFetches(connection)
    fetch = fetches.fetch(timeout_s=TIMEOUT_S)
    cancelled = fetch.cancel(release_offer=True)

    if not is_followed:
        fetches.closed()
    connection.lose(GONE)
    await cancelled

    assert fetch.notice is not None
    assert (fetch.notice.outcome, fetch.notice.stage) == ("cancelled", "lost")


async def test_release_refused_for_good_is_not_sent_again() -> None:
    connection = Recording(reply=None)
    fetches = RecordedFetches(connection)
    fetches.releases.add({"transfer_id": "t", "request_id": "r"})
    await checkpoint()
    start, cancel = connection.on_replies

    start(RequestRefused("expired", code=ErrorCode.FORBIDDEN))
    cancel(RequestRefused("no fetch", code=ErrorCode.FETCH_UNKNOWN))
    await anyio.sleep(0.05)

    assert len(connection.sent) == 2


async def test_release_at_busy_agent_is_sent_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.engine.fetches.RELEASE_PAUSE_S", 0.05)
    connection = Recording(reply=None)
    RecordedFetches(connection).releases.add({"transfer_id": "t"})
    await checkpoint()
    start, cancel = connection.on_replies

    start(busy())
    cancel(RequestRefused("no fetch", code=ErrorCode.FETCH_UNKNOWN))
    await checkpoint()
    assert len(connection.sent) == 2
    await until(lambda: len(connection.sent) == 4)
