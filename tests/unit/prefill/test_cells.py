"""Offers with a cell: a commit by the cell is that of one reader, as a request would be."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus import protocol
from kvbus.errors import ErrorCode
from kvbus.protocol import NUM_CELLS, CellNames, CommitCell, Outcome, Ticket
from kvbus.protocol.ticket import pooled_ticket
from kvbus_prefill.offer import events
from kvbus_prefill.offer.table import OfferTable
from tests.support.examples import num_examples
from tests.unit.prefill import test_offers as offers
from tests.unit.prefill.test_offers import DUE, SEALED, WITHDRAW, acquired, committed, said

TICKET = SEALED.ticket
REVOKED, OWN = events.CellsRevoked("engine"), events.CellCommitted("o1", "own")


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
        """Return a ticket of an offer with a cell."""
        return replace(TICKET, cell=self.names.open())

    def cell(self, ticket: Ticket) -> CommitCell:
        return CommitCell(self.swap, ticket)

    def live(self) -> Ticket:
        ticket = self.named()
        self.cell(ticket).open(ticket.cell)
        return ticket


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_live_cell_is_committed_once_or_closed(*, is_committed: bool) -> None:
    page = Page()
    ticket = page.named()
    agent, *readers = (page.cell(ticket) for _ in range(4))
    early = readers[0].commit("early")
    agent.open(ticket.cell)
    if not is_committed:
        assert agent.close() is None
    commits = [readers[0].commit("early"), readers[1].commit("one"), readers[2].commit("one")]
    assert [early, *commits] == [False, is_committed, False, False]
    assert not is_committed or agent.close() is ErrorCode.OFFER_COMPLETED
    assert agent.is_committed_by("early") == is_committed
    assert not agent.is_committed_by("one")


def test_a_ticket_that_was_altered_commits_nothing() -> None:
    page = Page()
    ticket = page.live()
    another: dict[str, Any] = {"secret": 32 * "b", "num_tokens": 31, "engine_id": "other"}
    another |= {"blocks": "gaRmdWxs", "offer_id": "o2", "agent_boot": "later", "cell": NUM_CELLS}
    for name, value in another.items():
        assert not page.cell(replace(ticket, **{name: value})).commit("token"), name
    assert page.cell(replace(ticket, traceparent="added by a router")).commit("token")


def test_cell_closed_by_engine_is_never_committed_or_opened() -> None:
    for at in ("named", "live", "committed"):
        page = Page()
        ticket = page.named() if at == "named" else page.live()
        if at == "committed":
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
    ticket = page.named()
    message = replace(SEALED.message, cell=ticket.cell)
    return replace(SEALED, message=message, ticket=ticket, cell=page.cell(ticket)), ticket


def started() -> tuple[Page, OfferTable, Ticket]:
    page, table = Page(), OfferTable(offers.LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    return page, table, ticket


def end(table: OfferTable, event: Any) -> list[Any]:
    return said(table.handle(event, 8.0 if event is DUE else 1.0))


@pytest.mark.parametrize(
    ("event", "answer"),
    [
        *((one, [ErrorCode.OFFER_COMPLETED]) for one in (acquired(), committed(token="other"))),
        *(
            (one, ["ok"])
            for one in (
                WITHDRAW,
                offers.asked(protocol.PeerWithdraw(**offers.OF, secret=offers.SECRET)),
            )
        ),
        *(
            (one, [])
            for one in (OWN, events.CellsChecked(), REVOKED, offers.LOST, offers.STOPPED, DUE)
        ),
    ],
    ids=lambda value: type(getattr(value, "message", value)).__name__,
)
def test_offer_committed_by_cell_is_completed_by_next_event(event: Any, answer: list[Any]) -> None:
    page, table, ticket = started()
    assert page.cell(ticket).commit("own")
    words = end(table, event)
    assert sorted(words) == sorted([offers.COMPLETED, *answer])
    assert said(table.handle(OWN, 9.0)) == [], "it comes behind"
    assert said(table.handle(committed(token="own"), 9.0)) == ["ok"], "that is its commit"
    assert said(table.handle(committed(token="late"), 9.0)) == [ErrorCode.OFFER_COMPLETED]


@pytest.mark.parametrize(
    "state", ["live", "committed by another", "closed by the engine", "closed"]
)
def test_false_report_of_committed_cell_changes_nothing(state: str) -> None:
    page, table, ticket = started()
    match state:
        case "committed by another":
            assert page.cell(ticket).commit("own")
        case "closed by the engine":
            page.names.close(ticket.cell)
        case "closed":
            table.handle(acquired(), 0.5)
    cells = list(page.cells)
    if state != "committed by another":
        assert said(table.handle(events.CellsChecked(), 1.0)) == []
    said_so = [table.handle(events.CellCommitted(one, "other"), 1.0) for one in ("o1", "o2")]
    assert said_so == [[], []]
    assert page.cells == cells
    assert "o1" in table.live


def test_who_has_no_right_and_who_only_asks_leave_the_cell_alone() -> None:
    page, table, ticket = started()
    for wrong in (
        acquired(secret="wrong"),
        committed(secret="wrong"),
        offers.asked(protocol.AwaitOffer(offers.SECRET, 1.0)),
    ):
        table.handle(wrong, 1.0)
    assert page.cell(ticket).commit("token")


ENDS = [acquired(), committed(), WITHDRAW, offers.LOST, offers.STOPPED, DUE]


@pytest.mark.parametrize("event", [*ENDS, REVOKED], ids=str)
def test_cell_is_closed_before_offer_may_end_or_go_to_reader(event: Any) -> None:
    page, table, ticket = started()
    end(table, event)
    assert not page.cell(ticket).commit("late")


@pytest.mark.parametrize("event", ENDS, ids=str)
def test_offer_is_lost_before_its_end_if_engine_closed_its_cell(event: Any) -> None:
    """A reader that has read later bytes may commit first."""
    page, table, ticket = started()
    page.names.close(ticket.cell)
    words = end(table, event)
    assert words.count(Outcome.WITHDRAWN) == 1
    assert ("ok" in words) == (event is WITHDRAW)
    assert said(table.handle(committed(), 9.0)) == [ErrorCode.ENGINE_LOST]


@pytest.mark.parametrize("by", ["nobody", "reader", "engine"])
def test_an_offer_is_parked_only_if_its_cell_was_live(by: str) -> None:
    page, table, ticket = started()
    match by:
        case "reader":
            assert page.cell(ticket).commit("own")
        case "engine":
            page.names.close(ticket.cell)
    ends = {"nobody": ["parked"], "reader": [offers.COMPLETED, "freed"]}
    words = said(table.handle(offers.COPIED, 1.0))
    assert words == ends.get(by, [offers.WITHDRAWN, "freed"])
    assert not page.cell(ticket).commit("late")


ENDING = {"withdraw": WITHDRAW, "lost": offers.LOST, "stopped": offers.STOPPED, "due": DUE}
STEPS = st.lists(
    st.tuples(st.sampled_from(["cell", "commit", "acquire"]), st.sampled_from("abc"))
    | st.tuples(st.sampled_from([*ENDING, "late", "release", "left", "park"])),
    min_size=2,
    max_size=9,
)


class Played:
    """An offer with a cell; the oracle's has none and is requested each commit."""

    def __init__(self) -> None:
        self.page, self.table, self.ticket = started()
        self.pooled, self.of_pool = self._in_pool()
        self.oracle, self.now, self.epoch = OfferTable(offers.LIMITS), 0.0, 0
        self.oracle.handle(SEALED, 0.0)
        self.late: list[events.CellCommitted] = []
        """Reports of commits by the cell that are still under way."""
        self.outcomes: dict[OfferTable, list[Outcome]] = {self.table: [], self.oracle: []}

    def _in_pool(self) -> tuple[events.Copied, Ticket]:
        """The offer's copy in a pool whose page has cells, too."""
        pooled = replace(offers.POOLED, blocks="blocks", cell=self.page.names.open())
        ticket = pooled_ticket(self.ticket, **pooled.names)
        return events.Copied("o1", pooled, self.page.cell(ticket)), ticket

    @property
    def is_parked(self) -> bool:
        entry = self.oracle.live.get("o1")
        return entry is not None and entry.pooled is not None

    def commit(self, reader: str) -> Any:
        """The request that a commit by the cell stands for."""
        where = offers.IN_POOL if self.is_parked else {}
        return committed(reader, token=reader, **where)

    def tell(self, table: OfferTable, event: Any) -> list[Any]:
        words = said(table.handle(event, self.now))
        self.epoch = max([self.epoch, *(int(one[6:]) for one in words if str(one)[:6] == "begin ")])
        self.outcomes[table] += [one for one in words if isinstance(one, Outcome)]
        return [one for one in words if one == "ok" or isinstance(one, ErrorCode)]

    def do(self, what: str, reader: str = "") -> None:
        event: Any = ENDING.get(what) or self.commit(reader)
        ticket = self.of_pool if self.is_parked else self.ticket
        entry = self.table.live.get("o1")
        match what:
            case "cell" | "commit" if any(one.token == reader for one in self.late):
                return  # the reader has it
            case "cell" if self.page.cell(ticket).commit(reader):
                self.late.append(events.CellCommitted("o1", reader))
                assert self.tell(self.oracle, event) == ["ok"]
                return
            case "late":
                assert not any(self.tell(self.table, one) for one in self.late)
                return
            case "left":
                cell = None if entry is None or self.is_parked else entry.cell
                if cell is not None and not cell.is_closed:
                    self.page.names.close(self.ticket.cell)
                    self.tell(self.oracle, offers.LOST)
                return
            case "park":
                assert self.tell(self.table, self.pooled) == self.tell(self.oracle, offers.COPIED)
                return
            case "release" if not self.oracle.live or not self.epoch:
                return
            case "release":
                event = offers.returned(self.epoch)
            case "acquire":
                event = acquired(reader)
            case "due":
                self.now += 2.5
        assert self.tell(self.table, event) == self.tell(self.oracle, event)


@settings(max_examples=num_examples(3000))
@given(steps=STEPS)
def test_every_answer_and_end_is_as_if_each_commit_was_requested(steps: list[Any]) -> None:
    played = Played()
    for step in (*steps, ("late",)):
        played.do(*step)
    played.now += 100.0
    played.do("due")
    assert played.outcomes[played.table] == played.outcomes[played.oracle]
    ended = played.oracle.find("o1")
    is_live = ended is not None and ended.ended_by is ErrorCode.DRAINING
    assert len(played.outcomes[played.table]) == (not is_live)
