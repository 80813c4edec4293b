"""Offers with a cell: whoever takes one by its cell is one reader, as one that asks is.

The oracle is a table of offers without cells, which is told of each take when it is made.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.errors import ErrorCode
from kvbus.protocol import (
    NUM_CELLS,
    AwaitOffer,
    CellNames,
    CommitCell,
    Outcome,
    PeerWithdraw,
    Ticket,
)
from kvbus_prefill.offer import events
from kvbus_prefill.offer.table import OfferTable
from tests.support.examples import num_examples
from tests.unit.prefill.test_offers import (
    COMPLETED,
    DUE,
    LIMITS,
    LOST,
    OF,
    SEALED,
    SECRET,
    STOPPED,
    TOKEN,
    WITHDRAW,
    acquired,
    asked,
    returned,
    said,
    taken,
)

TICKET = SEALED.ticket
REVOKED = events.CellsRevoked("engine")
"""The key of a reader that may write to the cells."""


@dataclass
class Page:
    """Cells in this process, and the engine's names for them."""

    cells: list[int] = field(default_factory=lambda: [0] * NUM_CELLS)

    def __post_init__(self) -> None:
        self.names = CellNames(self.swap)

    def swap(self, number: int, expected: int, value: int) -> int:
        found = self.cells[number]
        if found == expected:
            self.cells[number] = value
        return found

    def named(self) -> Ticket:
        """A ticket of an offer with a cell."""
        return replace(TICKET, cell=self.names.open())

    def cell(self, ticket: Ticket) -> CommitCell:
        """As one process sees it."""
        return CommitCell(self.swap, ticket)

    def live(self) -> Ticket:
        """A ticket whose cell is live."""
        ticket = self.named()
        self.cell(ticket).open(ticket.cell)
        return ticket


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_live_cell_is_taken_once_or_closed(*, is_committed: bool) -> None:
    page = Page()
    ticket = page.named()
    agent, *readers = (page.cell(ticket) for _ in range(4))
    early = readers[0].commit("early")
    agent.open(ticket.cell)
    if not is_committed:
        assert agent.close() is None

    takes = [readers[0].commit("early"), readers[1].commit("one"), readers[2].commit("one")]

    assert [early, *takes] == [False, is_committed, False, False]
    assert not is_committed or agent.close() is ErrorCode.OFFER_COMPLETED
    assert agent.is_committed_by("early") == is_committed
    assert not agent.is_committed_by("one")


ANOTHER: dict[str, Any] = {
    "secret": 32 * "b",
    "num_tokens": 31,
    "engine_id": "other",
    "blocks": "gaRmdWxs",
    "offer_id": "o2",
    "agent_boot": "later",
    "cell": NUM_CELLS,
}


@pytest.mark.parametrize("field", ANOTHER)
def test_who_shows_a_ticket_that_was_altered_takes_nothing(field: str) -> None:
    page = Page()
    ticket = page.live()
    altered = replace(ticket, **{field: ANOTHER[field]})

    assert not page.cell(altered).commit("token")
    assert page.cell(replace(ticket, traceparent="added by a router")).commit("token")


def test_what_the_engine_has_closed_nobody_takes_or_makes_live() -> None:
    for at in ("named", "live", "taken"):
        page = Page()
        ticket = page.named() if at == "named" else page.live()
        if at == "taken":
            assert page.cell(ticket).commit("token")
        page.names.close(ticket.cell)
        later = page.live()

        page.cell(ticket).open(ticket.cell)
        assert later.cell % NUM_CELLS == ticket.cell % NUM_CELLS
        assert not page.cell(ticket).commit("token")
        assert page.cell(ticket).close() is ErrorCode.ENGINE_LOST
        assert page.cell(later).commit("token")


def test_engine_has_limited_cells_and_further_offers_have_none() -> None:
    page = Page()
    names = [page.names.open() for _ in range(NUM_CELLS + 1)]

    assert names.pop() == 0
    assert len({name % NUM_CELLS for name in names}) == NUM_CELLS
    for name in names:
        page.names.close(name)
    assert set(page.cells) == {0}
    assert page.names.open() not in {0, *names}


def opened_with(page: Page) -> tuple[Any, Ticket]:
    """The event of an offer with a cell, and its ticket."""
    ticket = page.named()
    message = replace(SEALED.message, cell=ticket.cell)
    return replace(SEALED, message=message, ticket=ticket, cell=page.cell(ticket)), ticket


@pytest.mark.parametrize(
    ("event", "answer"),
    [
        (acquired(), [ErrorCode.OFFER_COMPLETED]),
        (taken(token="other"), [ErrorCode.OFFER_COMPLETED]),
        (events.CellCommitted("o1", "own"), []),
        (events.CellsChecked(), []),
        (WITHDRAW, ["ok"]),
        (asked(PeerWithdraw(**OF, secret=SECRET)), ["ok"]),
        (REVOKED, []),
        (LOST, []),
        (STOPPED, []),
        (DUE, []),
    ],
    ids=lambda value: type(getattr(value, "message", value)).__name__,
)
def test_offer_taken_by_cell_is_completed_by_any_next_event(event: Any, answer: list[Any]) -> None:
    page, table = Page(), OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    assert page.cell(ticket).commit("own")

    words = said(table.handle(event, 8.0 if event is DUE else 1.0))

    assert sorted(words) == sorted([COMPLETED, *answer])
    assert said(table.handle(events.CellCommitted("o1", "own"), 9.0)) == [], "it comes behind"
    assert said(table.handle(taken(token="own"), 9.0)) == ["ok"], "that is its commit"
    assert said(table.handle(taken(token="late"), 9.0)) == [ErrorCode.OFFER_COMPLETED]


@pytest.mark.parametrize("state", ["live", "taken by another", "closed by the engine", "closed"])
def test_false_report_of_taken_cell_changes_nothing(state: str) -> None:
    page, table = Page(), OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    match state:
        case "taken by another":
            assert page.cell(ticket).commit("own")
        case "closed by the engine":
            page.names.close(ticket.cell)
        case "closed":
            table.handle(acquired(), 0.5)
    cells = list(page.cells)
    if state != "taken by another":
        assert said(table.handle(events.CellsChecked(), 1.0)) == []

    said_so = [table.handle(events.CellCommitted(one, "other"), 1.0) for one in ("o1", "o2")]

    assert said_so == [[], []]
    assert page.cells == cells
    assert "o1" in table.live


@pytest.mark.parametrize(
    "event", [acquired(), taken(), WITHDRAW, REVOKED, LOST, STOPPED, DUE], ids=str
)
def test_cell_is_closed_before_offer_may_end_or_go_to_reader(event: Any) -> None:
    page, table = Page(), OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)

    table.handle(event, 8.0 if event is DUE else 1.0)

    assert not page.cell(ticket).commit("late")


def test_who_has_no_right_and_who_only_asks_leave_the_cell_alone() -> None:
    page, table = Page(), OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    for wrong in (acquired(secret="wrong"), taken(secret="wrong"), asked(AwaitOffer(SECRET, 1.0))):
        table.handle(wrong, 1.0)

    assert page.cell(ticket).commit("token")


@pytest.mark.parametrize("event", [acquired(), taken(), WITHDRAW, LOST, STOPPED, DUE], ids=str)
def test_offer_is_lost_before_its_end_if_engine_closed_its_cell(
    event: Any,
) -> None:
    """The take of a reader that has read what was written since may come first."""
    page, table = Page(), OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    page.names.close(ticket.cell)

    words = said(table.handle(event, 8.0 if event is DUE else 1.0))

    assert words.count(Outcome.WITHDRAWN) == 1
    assert ("ok" in words) == (event is WITHDRAW)
    assert said(table.handle(taken(), 9.0)) == [ErrorCode.ENGINE_LOST]


READERS = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(st.sampled_from(["cell", "take", "acquire"]), st.sampled_from(READERS))
    | st.tuples(st.sampled_from(["late", "return", "withdraw", "lost", "stopped", "due", "left"])),
    min_size=2,
    max_size=9,
)


@dataclass
class Played:
    """An offer with a cell, and the oracle's without."""

    page: Page = field(default_factory=Page)
    now: float = 0.0
    behind: list[Any] = field(default_factory=list)
    """What readers that took it by the cell say, which has not come yet."""
    outcomes: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))
    epoch: int = 0

    def __post_init__(self) -> None:
        self.table, self.oracle = OfferTable(LIMITS), OfferTable(LIMITS)
        made, self.ticket = opened_with(self.page)
        self.tell(self.table, made)
        self.tell(self.oracle, SEALED)

    def tell(self, table: OfferTable, event: Any) -> list[Any]:
        """The answers."""
        words = said(table.handle(event, self.now))
        self.epoch = max([self.epoch, *(int(one[6:]) for one in words if str(one)[:6] == "begin ")])
        self.outcomes[table is self.oracle].extend(one for one in words if isinstance(one, Outcome))
        return [one for one in words if one == "ok" or isinstance(one, ErrorCode)]

    def do(self, what: str, reader: str = "") -> None:
        event: Any = taken(reader, token=reader)
        if what in {"cell", "take"} and any(one.token == reader for one in self.behind):
            return  # who has it asks no more
        match what:
            case "cell" if self.page.cell(self.ticket).commit(reader):
                self.behind.append(events.CellCommitted("o1", reader))
                assert self.tell(self.oracle, event) == ["ok"]
                return
            case "late":
                for one in self.behind:
                    assert self.tell(self.table, one) == []
                return
            case "left":
                entry = self.table.live.get("o1")
                if entry is not None and entry.cell is not None and not entry.cell.is_closed:
                    self.page.names.close(self.ticket.cell)
                    self.tell(self.oracle, LOST)
                return
            case "due":
                self.now += 2.5
        others = {"withdraw": WITHDRAW, "lost": LOST, "stopped": STOPPED, "due": DUE}
        event = others.get(what, event)
        if what == "acquire":
            event = acquired(reader, token=TOKEN)
        elif what == "return":
            event = returned(max(self.epoch, 1))
            if not self.oracle.live or not self.epoch:
                return

        assert self.tell(self.table, event) == self.tell(self.oracle, event)


@settings(max_examples=num_examples(3000))
@given(steps=STEPS)
def test_every_answer_and_every_end_is_as_if_each_take_had_asked(steps: list[Any]) -> None:
    played = Played()
    for step in steps:
        played.do(*step)
    played.do("late")
    played.now += 100.0
    played.do("due")

    assert played.outcomes[0] == played.outcomes[1]
    ended = played.oracle.find("o1")
    lives_on = ended is not None and ended.ended_by is ErrorCode.DRAINING
    assert len(played.outcomes[0]) == (not lives_on)
