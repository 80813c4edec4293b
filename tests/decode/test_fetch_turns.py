"""Depth first: a bounded number of fetches begins, the others wait in order and without leases."""

import msgspec
import pytest

from kvbus.errors import ErrorCode, RemoteError
from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Ticket
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.state import FetchLimits, FetchState
from kvbus_decode.fetch.table import FetchTable

PATIENCE_S = 1.0
TICKET = Ticket("p", "boot-a", "tcp://p", "engine-p", "engine-boot", "o1", "r1", 32, "secret")


def requested(
    fetch_id: str, *, boot: str = "boot-a", timeout_s: float = 60.0, priority: int = 0
) -> ev.Requested:
    ticket = msgspec.structs.replace(TICKET, agent_boot=boot, offer_id=fetch_id)
    asked = ev.Requested(fetch_id, "engine-d", ticket, 0, 32, {}, timeout_s, "fetch", route="known")
    return msgspec.structs.replace(asked, priority=priority)


def granted(fetch_id: str, *, num_tokens: int = 32) -> ev.LeaseGranted:
    tables = {"full": BlockTable.of([7])}
    lease = Granted(1, 9.0, num_tokens, num_tokens == 32, tables, "token")
    return ev.LeaseGranted(fetch_id, 0.0, lease)


def busy(fetch_id: str) -> ev.StepFailed:
    return ev.StepFailed(fetch_id, RemoteError("another reads it", code=ErrorCode.BUSY))


def table_of(*asked: ev.Requested, num_places: int = 1) -> FetchTable:
    table = FetchTable(FetchLimits(num_places=num_places, patience_s=PATIENCE_S))
    for one in asked:
        table.handle(one, 0.0)
    return table


def claims(commands: list[ev.Command]) -> list[str]:
    return [c.fetch_id for c in commands if isinstance(c, ev.SendClaim)]


def state(table: FetchTable, fetch_id: str) -> FetchState:
    return table.live[fetch_id].state


def test_a_fetch_beyond_the_bound_holds_its_peer_and_claims_nothing():
    table = table_of(requested("f1"))

    commands = table.handle(requested("f2"), 0.0)

    assert [type(c) for c in commands] == [ev.SendReply, ev.HoldPeer]
    assert state(table, "f2") is FetchState.QUEUED


def test_the_next_begins_in_the_event_that_ends_one():
    table = table_of(requested("f1"), requested("f2"), requested("f3"))
    table.handle(granted("f1"), 0.0)
    table.handle(ev.ChunkRead("f1", 10), 0.0)

    commands = table.handle(ev.LeaseConfirmed("f1"), 0.5)

    assert claims(commands) == ["f2"]
    assert table.live["f2"].stages_s[FetchState.QUEUED] == 0.5


@pytest.mark.parametrize(
    "event",
    [granted("f1", num_tokens=0), busy("f1"), ev.CancelRequested("f1", "cancel")],
    ids=["waits for tokens", "another reads the offer", "cancelled"],
)
def test_the_next_begins_when_one_cannot_go_on(event):
    table = table_of(requested("f1"), requested("f2"))

    assert claims(table.handle(event, 0.0)) == ["f2"]


def test_blocks_that_drain_keep_nobody_from_beginning():
    table = table_of(requested("f1"), requested("f2"))
    table.handle(granted("f1"), 0.0)

    commands = table.handle(ev.CancelRequested("f1", "cancel"), 0.0)

    assert state(table, "f1") is FetchState.DRAINING
    assert claims(commands) == ["f2"]


def test_a_fetch_that_stalls_keeps_its_place_for_a_bounded_time():
    table = table_of(requested("f1"), requested("f2"))
    assert table.next_deadline() == PATIENCE_S

    assert claims(table.handle(ev.DeadlinePassed(), PATIENCE_S)) == ["f2"]
    assert state(table, "f1") is FetchState.CLAIMING


def test_agents_have_turns_and_the_fetches_of_one_have_them_in_order():
    asked = [requested(f"a{n}") for n in range(4)]
    table = table_of(*asked, requested("b0", boot="boot-b"), requested("b1", boot="boot-b"))

    begun = [
        claims(table.handle(ev.DeadlinePassed(), n * PATIENCE_S + n / 1000)) for n in range(1, 6)
    ]

    assert begun == [["a1"], ["b0"], ["a2"], ["b1"], ["a3"]]


def test_a_queued_fetch_fails_at_its_deadline_and_says_where_it_was():
    table = table_of(requested("f1"), requested("f2", timeout_s=0.5))

    (report,) = table.handle(ev.DeadlinePassed(), 0.5)

    assert isinstance(report, ev.ReportFetched)
    assert (report.fetch_id, report.stage, report.blocks_free) == ("f2", "queued", True)
    assert report.stages_s.queued == 0.5


def test_a_cancelled_fetch_does_not_wait_any_more():
    table = table_of(requested("f1"), requested("f2"), requested("f3"))
    table.handle(ev.CancelRequested("f2", "cancel"), 0.0)

    assert claims(table.handle(ev.CancelRequested("f1", "cancel"), 0.0)) == ["f3"]


def test_a_new_fetch_that_comes_late_does_not_have_the_turn_of_one_that_waits():
    """A place came free by its time, which nobody told the table before the new one asked."""
    table = table_of(requested("f1"), requested("f2"))

    begun = claims(table.handle(requested("f3"), PATIENCE_S))

    assert begun == ["f2"]
    assert state(table, "f3") is FetchState.QUEUED
    assert claims(table.handle(ev.DeadlinePassed(), 2 * PATIENCE_S)) == ["f3"]


def test_the_urgent_one_begins_first_of_those_that_wait():
    table = table_of(requested("f1"), requested("f2"), requested("f3", priority=1))
    table.handle(granted("f1"), 0.0)
    table.handle(ev.ChunkRead("f1", 10), 0.0)

    commands = table.handle(ev.LeaseConfirmed("f1"), 0.0)

    assert claims(commands) == ["f3"]
    assert state(table, "f2") is FetchState.QUEUED


def test_one_whose_agent_had_to_be_found_is_as_urgent():
    table = table_of(requested("f1"), requested("f2"))
    unknown = msgspec.structs.replace(requested("f3", priority=1), route=None)
    table.handle(unknown, 0.0)
    table.handle(ev.PeerReady("f3"), 0.0)
    table.handle(granted("f1"), 0.0)
    table.handle(ev.ChunkRead("f1", 10), 0.0)

    assert claims(table.handle(ev.LeaseConfirmed("f1"), 0.0)) == ["f3"]
