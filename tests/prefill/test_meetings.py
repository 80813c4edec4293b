"""The table of offers that are known by a name before they are made.

Each case is a script: events, some with the time and who is answered what. See `told`.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol import Empty, Met
from kvbus_prefill import meeting

ev = meeting.events
NAME, OTHER, THIRD = "n" * 32, "m" * 32, "k" * 32
TICKET = {"secret": "s" * 32, "blocks": "many"}
COMPLETED = LocalError("the offer is over", code=ErrorCode.OFFER_COMPLETED)
LIMITS = meeting.MeetingLimits(max_names=2, max_waiting=2, max_wait_s=5.0, engine_grace_s=2.0)


def wants(who: str, name: str = NAME, wait_s: float = 2.0) -> ev.Awaited:
    return ev.Awaited(name, wait_s, who)


MADE, ENDED, DUE = ev.Made(NAME, "offer", TICKET), ev.Ended("offer", COMPLETED), ev.DeadlinePassed()
GONE, THERE, DRAINS = ev.EnginesGone(), ev.EngineReady(), ev.DrainStarted()


def forgone(who: str, name: str = NAME) -> ev.Forgone:
    return ev.Forgone(name, who)


def told(commands: list[ev.Command]) -> dict[str, str]:
    """What each is told: of an offer ``met``, of a wish that is granted ``ok``, or a code."""
    words = {}
    for command in commands:
        match command:
            case ev.SendReply(who, Met(ticket)):
                assert ticket == TICKET
                words[str(who)] = "met"
            case ev.SendReply(who, _):
                words[str(who)] = "ok"
            case ev.Refuse(who, error):
                words[str(who)] = str(error.code)
            case ev.Withdraw(offer_id, secret, who):
                assert secret == TICKET["secret"]
                words[str(who)] = f"withdraw {offer_id}"
    return words


Step = ev.Event | tuple[float, ev.Event, dict[str, str]]


def play(*steps: Step) -> meeting.MeetingTable:
    """Tell a table each event; nobody is told anything by one that comes alone."""
    table, now = meeting.MeetingTable(LIMITS), 0.0
    for step in steps:
        now, event, expected = step if isinstance(step, tuple) else (now, step, {})
        assert told(table.handle(event, now)) == expected, (now, event)
    return table


# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    "who comes early is answered when the offer is made":
        [wants("a"), (1, wants("b"), {}), (1.5, MADE, {"a": "met", "b": "met"})],
    "who comes late is answered at once":
        [MADE, (0, wants("a"), {"a": "met"})],
    "who has waited long enough is told to ask again and may":
        [wants("a"), wants("b", wait_s=3.0), (2, DUE, {"a": "busy"}), (3, DUE, {"b": "busy"}),
         (4, wants("c"), {}), (4.5, MADE, {"c": "met"})],
    "who waits no longer is not answered":
        [wants("a"), wants("b"), ev.Abandoned(NAME, "a"), ev.Abandoned(NAME, "b"), wants("c"),
         (0, MADE, {"c": "met"})],
    "nobody waits for longer than the limit":
        [wants("a", wait_s=1000.0), (4.999, DUE, {}), (5, DUE, {"a": "busy"})],
    "of an offer that has ended it is told how":
        [MADE, ENDED, (0, wants("a"), {"a": "offer_completed"})],
    "an offer that is given up before it is made is never made":
        [wants("a"), (0, forgone("b"), {"a": "cancelled", "b": "ok"}),
         (0, wants("c"), {"c": "cancelled"})],
    "an offer that is given up when it is made is withdrawn":
        [MADE, (0, forgone("b"), {"b": "withdraw offer"})],
    "names and readers are bounded, and offers that are made do not count":
        [*[ev.Made(f"made-{n}" + NAME, f"offer-{n}", TICKET) for n in range(5)], wants("a"),
         wants("b"), (0, wants("c"), {"c": "busy"}), wants("d", OTHER),
         (0, wants("e", THIRD), {"e": "busy"})],
    "while the agent drains nobody waits":
        [wants("a"), ev.Made(OTHER, "offer", TICKET), (0, DRAINS, {"a": "draining"}),
         (0, wants("b"), {"b": "draining"}), (0, wants("c", OTHER), {"c": "met"})],
    "who waits is told at once when no engine is left":
        [THERE, wants("a", wait_s=5.0), (1, GONE, {"a": "engine_lost"})],
    "who asks while no engine is there waits for one for a while":
        [(1, GONE, {}), (1.5, wants("a", wait_s=5.0), {}), (3, DUE, {"a": "busy"}),
         (3.001, wants("b"), {"b": "engine_not_ready"})],
    "the while counts from the last engine and not from each that never was ready":
        [(1, GONE, {}), (2.9, GONE, {}), (3, wants("a"), {"a": "engine_not_ready"})],
    "an engine that comes in time makes the offer":
        [GONE, (1.5, wants("a", wait_s=5.0), {}), (1.9, THERE, {}), (2, DUE, {"a": "busy"}),
         (2.001, wants("b", wait_s=4.0), {}), (5, MADE, {"b": "met"})],
    "what was made and given up is known without an engine":
        [MADE, GONE, (9, forgone("a", OTHER), {"a": "ok"}), (10, wants("b"), {"b": "met"}),
         (10, wants("c", OTHER), {"c": "cancelled"}), DRAINS,
         (10, wants("d", THIRD), {"d": "draining"})],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_who_is_told_what_of_an_offer_by_its_name(script: list[Step]) -> None:
    play(*script)


def test_a_name_that_nobody_waits_for_is_forgotten() -> None:
    for end in (
        ev.Abandoned(NAME, "a"),
        (2.0, DUE, {"a": "busy"}),
        (1.0, GONE, {"a": "engine_lost"}),
    ):
        table = play(THERE, wants("a"), end)

        assert not table.live
        assert table.num_waiting == 0


def test_a_name_is_made_once_and_not_after_it_was_given_up() -> None:
    play().check_free(NAME)
    play(wants("a")).check_free(NAME)

    for steps, words in (([MADE], "made before"), ([MADE, ENDED], "made before")):
        with pytest.raises(LocalError, match=words):
            play(*steps).check_free(NAME)
    with pytest.raises(KVBusError, match="given it up"):
        play((0, forgone("b"), {"b": "ok"})).check_free(NAME)


@dataclass
class Told:
    """What requests were answered, by who asked."""

    table: meeting.MeetingTable = field(default_factory=lambda: meeting.MeetingTable(LIMITS))
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
