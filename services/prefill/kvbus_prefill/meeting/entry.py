"""One named offer: who waits for it, and what became of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvbus.errors import ErrorCode, KVBusError, LocalError, TooEarly
from kvbus.protocol.message import Empty
from kvbus.protocol.rendezvous import Met
from kvbus.table import Context as AnyContext
from kvbus.table import Story, Transition
from kvbus_prefill.meeting import events as ev


class MeetingState(StrEnum):
    """Where a named offer is. The last three are ends."""

    AWAITED = "awaited"
    """Readers ask for it, and the engine has not made it."""

    MADE = "made"
    """It is there: who asks is given its ticket."""

    ENDED = "ended"
    """It was released: who asks is told how."""

    FORGONE = "forgone"
    """It was not made when its reader gave up: it shall not be made."""

    LEFT = "left"
    """Nobody waits for it any more; nothing is remembered."""


AWAITED, MADE = MeetingState.AWAITED, MeetingState.MADE
ENDED, FORGONE, LEFT = MeetingState.ENDED, MeetingState.FORGONE, MeetingState.LEFT


@dataclass(frozen=True, slots=True)
class MeetingLimits:
    """Bounds of the table; durations in seconds.

    ``retry_s`` is when who was told that there is no offer yet may ask again. Readers wait until
    ``engine_grace_s`` after the last engine has gone: it may come back.
    """

    max_names: int = 4096
    max_waiting: int = 16
    max_wait_s: float = 30.0
    engine_grace_s: float = 2.0
    retry_s: float = 0.001
    max_retired: int = 16_384
    max_retired_bytes: int = 32 << 20


Context = AnyContext[MeetingLimits]
Commands = list[ev.Command]


@dataclass(slots=True)
class MeetingEntry:
    """A name; ``waiting`` are the requests for its ticket, each with its end."""

    transfer_id: str = field(repr=False)
    state: MeetingState = AWAITED
    offer_id: str = ""
    ticket: dict[str, Any] = field(default_factory=dict, repr=False)
    ended: KVBusError | None = None
    waiting: list[tuple[float, object]] = field(default_factory=list)
    story: Story = field(default_factory=Story, compare=False)

    @property
    def key(self) -> str:
        """Names it in the table."""
        return self.transfer_id

    @property
    def is_over(self) -> bool:
        """Whether nothing happens to it any more."""
        return self.state in (ENDED, FORGONE, LEFT)

    @property
    def due_at(self) -> float | None:
        """When the first of those that wait has waited long enough."""
        return min((until for until, _ in self.waiting), default=None)

    def retire(self) -> None:
        """Its ticket opens nothing any more."""
        self.ticket = {}


def wait(meeting: MeetingEntry, event: ev.Awaited, at: Context) -> Commands:
    """There is no offer yet: the answer comes with it."""
    if len(meeting.waiting) >= at.limits.max_waiting:
        raise LocalError(
            f"{len(meeting.waiting)} readers wait for this offer, which is the limit",
            code=ErrorCode.BUSY,
        )
    until = at.now + min(event.wait_s, at.limits.max_wait_s)
    meeting.waiting.append((until, event.reply_to))
    return []


def tell(meeting: MeetingEntry, event: ev.Awaited, _: Context) -> Commands:
    """The ticket, at once."""
    return [ev.SendReply(event.reply_to, Met(meeting.ticket))]


def make(meeting: MeetingEntry, event: ev.Made, _: Context) -> Commands:
    """All that wait are given the ticket."""
    meeting.state, meeting.offer_id, meeting.ticket = MADE, event.offer_id, dict(event.ticket)
    waiting, meeting.waiting = meeting.waiting, []
    return [ev.SendReply(reply_to, Met(meeting.ticket)) for _, reply_to in waiting]


def end_wait(meeting: MeetingEntry, _event: ev.DeadlinePassed, at: Context) -> Commands:
    """Some have waited long enough."""
    over = [reply_to for until, reply_to in meeting.waiting if until <= at.now]
    meeting.waiting = [one for one in meeting.waiting if one[0] > at.now]
    if not meeting.waiting:
        meeting.state = LEFT
    early = TooEarly(
        "the prefill engine has not made this offer yet", retry_after_s=at.limits.retry_s
    )
    return [ev.Refuse(reply_to, early) for reply_to in over]


def leave(meeting: MeetingEntry, event: ev.Abandoned, _: Context) -> Commands:
    """One waits no longer."""
    meeting.waiting = [one for one in meeting.waiting if one[1] is not event.reply_to]
    if not meeting.waiting:
        meeting.state = LEFT
    return []


def forgo(meeting: MeetingEntry, event: ev.Forgone, _: Context) -> Commands:
    """It shall not be made; others that wait for it are told."""
    waiting, meeting.waiting = meeting.waiting, []
    meeting.state = FORGONE
    refused: Commands = [ev.Refuse(reply_to, given_up()) for _, reply_to in waiting]
    return [*refused, ev.SendReply(event.reply_to, Empty())]


def withdraw(meeting: MeetingEntry, event: ev.Forgone, _: Context) -> Commands:
    """It was made meanwhile: it ends."""
    return [ev.Withdraw(meeting.offer_id, meeting.ticket["secret"], event.reply_to)]


def end(meeting: MeetingEntry, event: ev.Ended, _: Context) -> Commands:
    """It was released."""
    meeting.state, meeting.ended = ENDED, event.error
    return []


def refuse(meeting: MeetingEntry, event: ev.Awaited, _: Context) -> Commands:
    """It was there, or was given up."""
    return [ev.Refuse(event.reply_to, meeting.ended or given_up())]


def say_yes(_meeting: MeetingEntry, event: ev.Forgone, _: Context) -> Commands:
    """It is over already."""
    return [ev.SendReply(event.reply_to, Empty())]


def turn_away(meeting: MeetingEntry, _event: ev.DrainStarted, _: Context) -> Commands:
    """No offer will be made any more."""
    waiting, meeting.waiting = meeting.waiting, []
    meeting.state = LEFT
    return [ev.Refuse(reply_to, draining()) for _, reply_to in waiting]


def lose_engines(meeting: MeetingEntry, _event: ev.EnginesGone, _: Context) -> Commands:
    """The engine that was asked for it has ended, and nobody else here can make it."""
    waiting, meeting.waiting = meeting.waiting, []
    meeting.state = LEFT
    lost = LocalError("the prefill engine is gone", code=ErrorCode.ENGINE_LOST)
    return [ev.Refuse(reply_to, lost) for _, reply_to in waiting]


def draining() -> LocalError:
    """Why no offer of this name will be made here."""
    return LocalError("the prefill agent is draining", code=ErrorCode.DRAINING)


def given_up() -> LocalError:
    """Why an offer of this name is neither made nor waited for."""
    return LocalError("the reader of this offer has given it up", code=ErrorCode.CANCELLED)


TRANSITIONS: Mapping[tuple[MeetingState, type[Any]], Transition[MeetingState]] = {
    (AWAITED, ev.Awaited): Transition(wait, (AWAITED,)),
    (AWAITED, ev.Abandoned): Transition(leave, (AWAITED, LEFT)),
    (AWAITED, ev.Made): Transition(make, (MADE,)),
    (AWAITED, ev.Forgone): Transition(forgo, (FORGONE,)),
    (AWAITED, ev.DeadlinePassed): Transition(end_wait, (AWAITED, LEFT)),
    (AWAITED, ev.EnginesGone): Transition(lose_engines, (LEFT,)),
    (AWAITED, ev.DrainStarted): Transition(turn_away, (LEFT,)),
    (MADE, ev.Awaited): Transition(tell, (MADE,)),
    (MADE, ev.Forgone): Transition(withdraw, (MADE,)),
    (MADE, ev.Ended): Transition(end, (ENDED,)),
    (ENDED, ev.Awaited): Transition(refuse, (ENDED,)),
    (ENDED, ev.Forgone): Transition(say_yes, (ENDED,)),
    (FORGONE, ev.Awaited): Transition(refuse, (FORGONE,)),
    (FORGONE, ev.Forgone): Transition(say_yes, (FORGONE,)),
}
"""A name is made once: what comes for one that was made before is refused by the table."""
