"""Which event does what to a fetch in which state: the table.

Refuses nothing aloud: an event that comes too late for its fetch changes nothing, but a lease that
it brings is given back. Every handler returns the commands for the agent, in order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbus_decode.fetch import endings, progress
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.context import Commands, Context
from kvbus_decode.fetch.entry import ENDS, STAGES, FetchEntry, FetchState

RESOLVING, CLAIMING, WAITING = FetchState.RESOLVING, FetchState.CLAIMING, FetchState.WAITING
READING, CONFIRMING, DRAINING = FetchState.READING, FetchState.CONFIRMING, FetchState.DRAINING
COMPLETED, FAILED, CANCELLED = ENDS

Handler = Callable[[FetchEntry, Any, Context], Commands]


@dataclass(frozen=True, slots=True)
class Transition:
    """A handler, and the states in which it can leave the fetch."""

    handler: Handler
    to: tuple[FetchState, ...]


def _table() -> Mapping[tuple[FetchState, type[ev.Event]], Transition]:
    rows: dict[tuple[FetchState, type[ev.Event]], Transition] = {}
    for state in FetchState:
        rows |= {(state, kind): Transition(endings.ignore, (state,)) for kind in IGNORED_BY_DEFAULT}
    for state in STAGES:
        ends = (DRAINING,) if state is READING else (FAILED,)
        stays = () if state in (RESOLVING, CONFIRMING) else (state,)
        rows[state, ev.CancelRequested] = Transition(
            endings.cancel, (DRAINING,) if state is READING else (CANCELLED,)
        )
        rows[state, ev.PeerGone] = Transition(endings.lose_peer, ends)
        rows[state, ev.EngineLost] = Transition(endings.lose_engine, ends)
        rows[state, ev.Stopped] = Transition(endings.stop, ends)
        rows[state, ev.StepFailed] = Transition(endings.fail_step, ends)
        rows[state, ev.DeadlinePassed] = Transition(progress.check_time, (*stays, *ends))
    for state in (DRAINING, *ENDS):
        rows[state, ev.CancelRequested] = Transition(endings.accept_late_cancel, (state,))
        rows[state, ev.LeaseGranted] = Transition(endings.give_back_late_lease, (state,))
    rows.update(SPECIFIC)
    return rows


IGNORED_BY_DEFAULT: tuple[type[ev.Event], ...] = (
    ev.PeerReady,
    ev.LeaseGranted,
    ev.StepFailed,
    ev.RenewFailed,
    ev.OfferAdvanced,
    ev.ReadEnded,
    ev.LeaseConfirmed,
    ev.PeerGone,
    ev.EngineLost,
    ev.Stopped,
    ev.DeadlinePassed,
)

AFTER_A_GRANT = (WAITING, READING, CONFIRMING, FAILED)

SPECIFIC: Mapping[tuple[FetchState, type[ev.Event]], Transition] = {
    (RESOLVING, ev.PeerReady): Transition(progress.start_claim, (CLAIMING,)),
    (CLAIMING, ev.LeaseGranted): Transition(progress.take_grant, AFTER_A_GRANT),
    (CLAIMING, ev.StepFailed): Transition(progress.retry_or_fail, (CLAIMING, FAILED)),
    (CLAIMING, ev.OfferAdvanced): Transition(progress.note_hint, (CLAIMING,)),
    (WAITING, ev.LeaseGranted): Transition(progress.take_grant, AFTER_A_GRANT),
    (WAITING, ev.OfferAdvanced): Transition(progress.ask_for_news, (WAITING,)),
    (WAITING, ev.RenewFailed): Transition(progress.note_renewal_failed, (WAITING, FAILED)),
    (READING, ev.LeaseGranted): Transition(progress.take_grant, (READING, DRAINING)),
    (READING, ev.OfferAdvanced): Transition(progress.ask_for_news, (READING,)),
    (READING, ev.RenewFailed): Transition(progress.note_renewal_failed, (READING, DRAINING)),
    (READING, ev.ReadEnded): Transition(progress.end_piece, (READING, WAITING, CONFIRMING, FAILED)),
    (CONFIRMING, ev.LeaseConfirmed): Transition(progress.complete, (COMPLETED,)),
    (DRAINING, ev.ReadEnded): Transition(endings.finish_draining, (FAILED, CANCELLED)),
}

TRANSITIONS = _table()
