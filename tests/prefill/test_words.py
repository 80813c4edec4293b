"""Offers with a word: whoever takes one by its word is one reader, as one that asks is.

The oracle is a table of offers without words, which is told of each take when it is made.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.errors import ErrorCode
from kvbus.protocol import NUM_WORDS, Meet, Outcome, PeerWithdraw, Ticket, Word, WordNames
from kvbus_prefill import offer
from tests.examples import num_examples
from tests.prefill.test_offers import (
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
REVOKED = offer.events.WordsRevoked("engine")
"""The key of a reader that may write to the words."""


@dataclass
class Page:
    """Words in this process, and the engine's names for them."""

    words: list[int] = field(default_factory=lambda: [0] * NUM_WORDS)

    def __post_init__(self) -> None:
        self.names = WordNames(self.swap)

    def swap(self, number: int, expected: int, value: int) -> int:
        found = self.words[number]
        if found == expected:
            self.words[number] = value
        return found

    def named(self) -> Ticket:
        """A ticket of an offer with a word."""
        return replace(TICKET, word=self.names.open())

    def word(self, ticket: Ticket) -> Word:
        """As one process sees it."""
        return Word(self.swap, ticket)

    def live(self) -> Ticket:
        """A ticket whose word is live."""
        ticket = self.named()
        self.word(ticket).open(ticket.word)
        return ticket


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_live_word_is_taken_once_or_closed(*, is_taken: bool) -> None:
    page = Page()
    ticket = page.named()
    agent, *readers = (page.word(ticket) for _ in range(4))
    early = readers[0].take("early")
    agent.open(ticket.word)
    if not is_taken:
        assert agent.close() is None

    takes = [readers[0].take("early"), readers[1].take("one"), readers[2].take("one")]

    assert [early, *takes] == [False, is_taken, False, False]
    assert not is_taken or agent.close() is ErrorCode.OFFER_COMPLETED
    assert agent.is_taken_by("early") == is_taken
    assert not agent.is_taken_by("one")


ANOTHER: dict[str, Any] = {
    "secret": 32 * "b",
    "num_tokens": 31,
    "engine_id": "other",
    "blocks": "gaRmdWxs",
    "offer_id": "o2",
    "agent_boot": "later",
    "word": NUM_WORDS,
}


@pytest.mark.parametrize("field", ANOTHER)
def test_who_shows_a_ticket_that_was_altered_takes_nothing(field: str) -> None:
    page = Page()
    ticket = page.live()
    altered = replace(ticket, **{field: ANOTHER[field]})

    assert not page.word(altered).take("token")
    assert page.word(replace(ticket, traceparent="added by a router")).take("token")


def test_what_the_engine_has_closed_nobody_takes_or_makes_live() -> None:
    for at in ("named", "live", "taken"):
        page = Page()
        ticket = page.named() if at == "named" else page.live()
        if at == "taken":
            assert page.word(ticket).take("token")
        page.names.close(ticket.word)
        later = page.live()

        page.word(ticket).open(ticket.word)
        assert later.word % NUM_WORDS == ticket.word % NUM_WORDS
        assert not page.word(ticket).take("token")
        assert page.word(ticket).close() is ErrorCode.ENGINE_LOST
        assert page.word(later).take("token")


def test_an_engine_has_so_many_offers_with_words_and_the_others_have_none() -> None:
    page = Page()
    names = [page.names.open() for _ in range(NUM_WORDS + 1)]

    assert names.pop() == 0
    assert len({name % NUM_WORDS for name in names}) == NUM_WORDS
    for name in names:
        page.names.close(name)
    assert set(page.words) == {0}
    assert page.names.open() not in {0, *names}


def opened_with(page: Page) -> tuple[Any, Ticket]:
    """The event of an offer with a word, and its ticket."""
    ticket = page.named()
    message = replace(SEALED.message, word=ticket.word)
    return replace(SEALED, message=message, ticket=ticket, word=page.word(ticket)), ticket


@pytest.mark.parametrize(
    ("event", "answer"),
    [
        (acquired(), [ErrorCode.OFFER_COMPLETED]),
        (taken(token="other"), [ErrorCode.OFFER_COMPLETED]),
        (offer.events.WordTaken("o1", "own"), []),
        (offer.events.WordsChecked(), []),
        (WITHDRAW, ["ok"]),
        (asked(PeerWithdraw(**OF, secret=SECRET)), ["ok"]),
        (REVOKED, []),
        (LOST, []),
        (STOPPED, []),
        (DUE, []),
    ],
    ids=lambda value: type(getattr(value, "message", value)).__name__,
)
def test_an_offer_that_was_taken_by_its_word_is_completed_by_whatever_comes(
    event: Any, answer: list[Any]
) -> None:
    page, table = Page(), offer.OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    assert page.word(ticket).take("own")

    words = said(table.handle(event, 8.0 if event is DUE else 1.0))

    assert sorted(words) == sorted([COMPLETED, *answer])
    assert said(table.handle(offer.events.WordTaken("o1", "own"), 9.0)) == [], "it comes behind"
    assert said(table.handle(taken(token="own"), 9.0)) == ["ok"], "that is its commit"
    assert said(table.handle(taken(token="late"), 9.0)) == [ErrorCode.OFFER_COMPLETED]


@pytest.mark.parametrize("state", ["live", "taken by another", "closed by the engine", "closed"])
def test_who_says_that_it_has_taken_what_it_has_not_changes_nothing(state: str) -> None:
    page, table = Page(), offer.OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    match state:
        case "taken by another":
            assert page.word(ticket).take("own")
        case "closed by the engine":
            page.names.close(ticket.word)
        case "closed":
            table.handle(acquired(), 0.5)
    words = list(page.words)
    if state != "taken by another":
        assert said(table.handle(offer.events.WordsChecked(), 1.0)) == []

    said_so = [table.handle(offer.events.WordTaken(one, "other"), 1.0) for one in ("o1", "o2")]

    assert said_so == [[], []]
    assert page.words == words
    assert "o1" in table.live


@pytest.mark.parametrize(
    "event", [acquired(), taken(), WITHDRAW, REVOKED, LOST, STOPPED, DUE], ids=str
)
def test_what_may_end_an_offer_or_gives_it_to_a_reader_closes_its_word_first(event: Any) -> None:
    page, table = Page(), offer.OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)

    table.handle(event, 8.0 if event is DUE else 1.0)

    assert not page.word(ticket).take("late")


def test_who_has_no_right_and_who_only_asks_leave_the_word_alone() -> None:
    page, table = Page(), offer.OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    for wrong in (acquired(secret="wrong"), taken(secret="wrong"), asked(Meet(SECRET, 1.0))):
        table.handle(wrong, 1.0)

    assert page.word(ticket).take("token")


@pytest.mark.parametrize("event", [acquired(), taken(), WITHDRAW, LOST, STOPPED, DUE], ids=str)
def test_an_offer_whose_engine_has_closed_the_word_is_lost_before_its_end_is_heard(
    event: Any,
) -> None:
    """The take of a reader that has read what was written since may come first."""
    page, table = Page(), offer.OfferTable(LIMITS)
    made, ticket = opened_with(page)
    table.handle(made, 0.0)
    page.names.close(ticket.word)

    words = said(table.handle(event, 8.0 if event is DUE else 1.0))

    assert words.count(Outcome.WITHDRAWN) == 1
    assert ("ok" in words) == (event is WITHDRAW)
    assert said(table.handle(taken(), 9.0)) == [ErrorCode.ENGINE_LOST]


READERS = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(st.sampled_from(["word", "take", "acquire"]), st.sampled_from(READERS))
    | st.tuples(st.sampled_from(["late", "return", "withdraw", "lost", "stopped", "due", "left"])),
    min_size=2,
    max_size=9,
)


@dataclass
class Played:
    """An offer with a word, and the oracle's without."""

    page: Page = field(default_factory=Page)
    now: float = 0.0
    behind: list[Any] = field(default_factory=list)
    """What readers that took it by the word say, which has not come yet."""
    outcomes: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))
    epoch: int = 0

    def __post_init__(self) -> None:
        self.table, self.oracle = offer.OfferTable(LIMITS), offer.OfferTable(LIMITS)
        made, self.ticket = opened_with(self.page)
        self.tell(self.table, made)
        self.tell(self.oracle, SEALED)

    def tell(self, table: offer.OfferTable, event: Any) -> list[Any]:
        """The answers."""
        words = said(table.handle(event, self.now))
        self.epoch = max([self.epoch, *(int(one[6:]) for one in words if str(one)[:6] == "begin ")])
        self.outcomes[table is self.oracle].extend(one for one in words if isinstance(one, Outcome))
        return [one for one in words if one == "ok" or isinstance(one, ErrorCode)]

    def do(self, what: str, reader: str = "") -> None:
        event: Any = taken(reader, token=reader)
        if what in {"word", "take"} and any(one.token == reader for one in self.behind):
            return  # who has it asks no more
        match what:
            case "word" if self.page.word(self.ticket).take(reader):
                self.behind.append(offer.events.WordTaken("o1", reader))
                assert self.tell(self.oracle, event) == ["ok"]
                return
            case "late":
                for one in self.behind:
                    assert self.tell(self.table, one) == []
                return
            case "left":
                entry = self.table.live.get("o1")
                if entry is not None and entry.word is not None and not entry.word.is_closed:
                    self.page.names.close(self.ticket.word)
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
