"""The table of offers that are known by a name before they are made."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol import Empty, Met
from kvbus_prefill.meeting import events as ev
from kvbus_prefill.meeting.entry import MeetingLimits
from kvbus_prefill.meeting.table import MeetingTable

NAME, OTHER = "n" * 32, "m" * 32
TICKET = {"secret": "s" * 32, "blocks": "many"}
COMPLETED = LocalError("the offer is over", code=ErrorCode.OFFER_COMPLETED)
LIMITS = MeetingLimits(max_names=2, max_waiting=2, max_wait_s=5.0, engine_grace_s=2.0)


@dataclass
class Told:
    """What requests were answered, by who asked."""

    table: MeetingTable = field(default_factory=lambda: MeetingTable(LIMITS))
    answers: dict[object, list[Any]] = field(default_factory=dict)
    withdrawn: list[ev.Withdraw] = field(default_factory=list)

    def handle(self, event: ev.Event, now: float = 0.0) -> None:
        for command in self.table.handle(event, now):
            match command:
                case ev.SendReply(reply_to, body):
                    self.answers.setdefault(reply_to, []).append(body)
                case ev.Refuse(reply_to, error):
                    self.answers.setdefault(reply_to, []).append(error.code)
                case ev.Withdraw():
                    self.withdrawn.append(command)

    def await_(
        self, who: object, now: float = 0.0, *, name: str = NAME, wait_s: float = 2.0
    ) -> Any:
        self.handle(ev.Awaited(name, wait_s, who), now)
        return self.answer(who)

    def answer(self, who: object) -> Any:
        """The only one, None if there was none."""
        answers = self.answers.get(who, [None])
        assert len(answers) == 1
        return answers[0]


@pytest.fixture
def told() -> Told:
    return Told()


def test_who_comes_early_is_answered_when_the_offer_is_made(told: Told) -> None:
    assert told.await_("a") is None
    assert told.await_("b", 1.0) is None

    told.handle(ev.Made(NAME, "offer", TICKET), 1.5)

    assert told.answer("a") == told.answer("b") == Met(TICKET)


def test_who_comes_late_is_answered_at_once(told: Told) -> None:
    told.handle(ev.Made(NAME, "offer", TICKET))

    assert told.await_("a") == Met(TICKET)


def test_who_has_waited_long_enough_is_told_to_ask_again_and_may(told: Told) -> None:
    told.await_("a", 0.0, wait_s=2.0)
    told.await_("b", 0.0, wait_s=3.0)
    told.handle(ev.DeadlinePassed(), 2.0)

    assert told.answer("a") is ErrorCode.BUSY
    assert told.answer("b") is None
    told.handle(ev.DeadlinePassed(), 3.0)
    assert told.answer("b") is ErrorCode.BUSY
    assert not told.table.live
    assert not told.table.retired
    told.await_("c", 4.0)
    told.handle(ev.Made(NAME, "offer", TICKET), 4.5)
    assert told.answer("c") == Met(TICKET)


def test_who_waits_no_longer_is_not_answered_and_leaves_no_name_behind(told: Told) -> None:
    told.await_("a")
    told.await_("b")
    told.handle(ev.Abandoned(NAME, "a"))
    assert told.table.num_waiting == 1
    told.handle(ev.Abandoned(NAME, "b"))

    assert not told.table.live
    assert told.await_("c") is None
    told.handle(ev.Made(NAME, "offer", TICKET))
    assert told.answer("a") is told.answer("b") is None
    assert told.answer("c") == Met(TICKET)


def test_nobody_waits_for_longer_than_the_limit(told: Told) -> None:
    told.await_("a", 0.0, wait_s=1000.0)

    assert told.table.next_deadline() == LIMITS.max_wait_s


def test_a_name_is_made_once(told: Told) -> None:
    told.table.check_free(NAME)
    told.await_("a")
    told.table.check_free(NAME)
    told.handle(ev.Made(NAME, "offer", TICKET))

    with pytest.raises(LocalError, match="made before"):
        told.table.check_free(NAME)
    told.handle(ev.Ended("offer", COMPLETED))
    with pytest.raises(LocalError, match="made before"):
        told.table.check_free(NAME)


def test_of_an_offer_that_has_ended_it_is_told_how(told: Told) -> None:
    told.handle(ev.Made(NAME, "offer", TICKET))
    told.handle(ev.Ended("offer", COMPLETED))

    assert told.await_("a") is ErrorCode.OFFER_COMPLETED


def test_an_offer_that_is_given_up_before_it_is_made_is_never_made(told: Told) -> None:
    told.await_("a")
    told.handle(ev.Forgone(NAME, "b"))

    assert told.answer("a") is ErrorCode.CANCELLED
    assert told.answer("b") == Empty()
    with pytest.raises(KVBusError, match="given it up"):
        told.table.check_free(NAME)
    assert told.await_("c") is ErrorCode.CANCELLED


def test_an_offer_that_is_given_up_when_it_is_made_is_withdrawn(told: Told) -> None:
    told.handle(ev.Made(NAME, "offer", TICKET))
    told.handle(ev.Forgone(NAME, "b"))

    assert told.withdrawn == [ev.Withdraw("offer", TICKET["secret"], "b")]


def test_names_and_readers_are_bounded_and_offers_that_are_made_do_not_count(told: Told) -> None:
    for number in range(5):
        told.handle(ev.Made(f"made-{number}" + NAME, f"offer-{number}", TICKET))
    told.await_("a")
    told.await_("b")

    assert told.await_("c") is ErrorCode.BUSY
    assert told.await_("d", name=OTHER) is None
    assert told.await_("e", name="k" * 32) is ErrorCode.BUSY


def test_while_the_agent_drains_nobody_waits(told: Told) -> None:
    told.await_("a")
    told.handle(ev.Made(OTHER, "offer", TICKET))
    told.handle(ev.DrainStarted())

    assert told.answer("a") is ErrorCode.DRAINING
    assert told.await_("b") is ErrorCode.DRAINING
    assert told.await_("c", name=OTHER) == Met(TICKET)


def test_who_waits_is_told_at_once_when_no_engine_is_left(told: Told) -> None:
    told.handle(ev.EngineReady())
    told.await_("a", wait_s=5.0)
    told.handle(ev.EnginesGone(), 1.0)

    assert told.answer("a") is ErrorCode.ENGINE_LOST
    assert not told.table.live


def test_who_asks_while_no_engine_is_there_waits_for_one_for_a_while(told: Told) -> None:
    told.handle(ev.EnginesGone(), 1.0)
    assert told.await_("a", 1.5, wait_s=5.0) is None
    told.handle(ev.DeadlinePassed(), 3.0)

    assert told.answer("a") is ErrorCode.BUSY
    assert told.await_("a again", 3.001, wait_s=5.0) is ErrorCode.ENGINE_NOT_READY
    assert not told.table.live


def test_the_while_counts_from_the_last_engine_and_not_from_each_that_never_was_ready(
    told: Told,
) -> None:
    told.handle(ev.EnginesGone(), 1.0)
    told.handle(ev.EnginesGone(), 2.9)

    assert told.await_("a", 3.0) is ErrorCode.ENGINE_NOT_READY


def test_an_engine_that_comes_in_time_makes_the_offer(told: Told) -> None:
    told.handle(ev.EnginesGone())
    told.await_("a", 1.5, wait_s=5.0)
    told.handle(ev.EngineReady(), 1.9)
    told.handle(ev.DeadlinePassed(), 2.0)
    assert told.answer("a") is ErrorCode.BUSY
    assert told.await_("a again", 2.001, wait_s=4.0) is None
    told.handle(ev.Made(NAME, "offer", TICKET), 5.0)

    assert told.answer("a again") == Met(TICKET)


def test_what_was_made_and_given_up_is_known_without_an_engine(told: Told) -> None:
    told.handle(ev.Made(NAME, "offer", TICKET))
    told.handle(ev.EnginesGone())
    told.handle(ev.Forgone(OTHER, "a"), 9.0)

    assert told.await_("b", 10.0) == Met(TICKET)
    assert told.await_("c", 10.0, name=OTHER) is ErrorCode.CANCELLED
    told.handle(ev.DrainStarted(), 10.0)
    assert told.await_("d", 10.0, name="k" * 32) is ErrorCode.DRAINING


class Meetings(RuleBasedStateMachine):
    """Whatever comes in whatever order: each request is answered once, in time, and truly."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.now, self.number = Told(), 0.0, 0
        self.asked: dict[int, tuple[str, float]] = {}
        self.made: dict[str, str] = {}
        self.forgone: set[str] = set()
        self.gone_at: float | None = None

    names = st.sampled_from([c * 32 for c in "abc"])

    @rule(name=names, wait_s=st.sampled_from([0.5, 2.0, 100.0]))
    def reader_asks(self, name: str, wait_s: float) -> None:
        self.number += 1
        self.asked[self.number] = (name, self.now + min(wait_s, LIMITS.max_wait_s))
        self.told.handle(ev.Awaited(name, wait_s, self.number), self.now)

    @rule(name=names)
    def engine_offers(self, name: str) -> None:
        try:
            self.told.table.check_free(name)
        except KVBusError:
            assert name in self.made or name in self.forgone
            return
        assert name not in self.made
        assert name not in self.forgone
        self.made[name] = f"offer-{len(self.made)}"
        self.told.handle(ev.Made(name, self.made[name], {**TICKET, "of": name}), self.now)

    @rule(name=names)
    def offer_ends(self, name: str) -> None:
        if name in self.made:
            self.told.handle(ev.Ended(self.made[name], COMPLETED), self.now)

    @rule(name=names)
    def reader_gives_up(self, name: str) -> None:
        self.number += 1
        self.asked[self.number] = (name, self.now)
        self.told.handle(ev.Forgone(name, self.number), self.now)
        if name not in self.made and self.told.answers.get(self.number) == [Empty()]:
            self.forgone.add(name)
        for command in self.told.withdrawn:  # as the offer table does
            self.told.answers.setdefault(command.reply_to, [Empty()])

    @rule()
    def engine_comes(self) -> None:
        self.gone_at = None
        self.told.handle(ev.EngineReady(), self.now)

    @rule()
    def engines_go(self) -> None:
        self.gone_at = self.now if self.gone_at is None else self.gone_at
        self.told.handle(ev.EnginesGone(), self.now)

    @rule(by=st.floats(0.1, 3.0))
    def time_goes_by(self, by: float) -> None:
        self.now += by
        self.told.handle(ev.DeadlinePassed(), self.now)

    @invariant()
    def every_request_is_answered_once_and_in_time(self) -> None:
        for who, (name, until) in self.asked.items():
            answers = self.told.answers.get(who, [])
            assert len(answers) <= 1
            assert answers or self.now < until
            for answer in answers:
                assert not isinstance(answer, Met) or answer.ticket["of"] == name

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        for who, (name, _) in self.asked.items():
            if name in self.made or name in self.forgone:
                assert self.told.answers.get(who)

    @invariant()
    def nobody_waits_for_an_engine_that_does_not_come(self) -> None:
        if self.gone_at is not None and self.now > self.gone_at + LIMITS.engine_grace_s:
            assert not self.told.table.num_waiting

    @invariant()
    def what_nobody_waits_for_is_forgotten(self) -> None:
        assert len(self.told.table.live) <= len(self.made) + self.told.table.num_waiting


TestMeetings = Meetings.TestCase
