"""Which event does what to a fetch in which state: the table, and its handlers.

Refuses nothing aloud: an event that comes too late for its fetch changes nothing, but a lease that
it brings is given back. Every handler returns the commands for the agent, in order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError, RemoteError
from kvbus.protocol.engine import Outcome
from kvbus.protocol.message import Empty
from kvbus_decode import fetch_events as ev
from kvbus_decode.fetch import ENDS, STAGES, Fetch, FetchLimits, FetchState

RESOLVING, CLAIMING, WAITING = FetchState.RESOLVING, FetchState.CLAIMING, FetchState.WAITING
READING, CONFIRMING, DRAINING = FetchState.READING, FetchState.CONFIRMING, FetchState.DRAINING
COMPLETED, FAILED, CANCELLED = ENDS


@dataclass(frozen=True, slots=True)
class Moment:
    """What a handler may know of the world: the time, and the bounds of the table."""

    now: float
    limits: FetchLimits

    def timeout_s(self, fetch: Fetch) -> float:
        """How long one request of ``fetch`` may take."""
        return max(1e-3, min(self.limits.request_timeout_s, fetch.deadline - self.now))


Commands = list[ev.Command]
Handler = Callable[[Fetch, Any, Moment], Commands]


@dataclass(frozen=True, slots=True)
class Transition:
    """A handler, and the states in which it can leave the fetch."""

    handler: Handler
    to: tuple[FetchState, ...]


def start_claim(fetch: Fetch, _event: ev.PeerReady, at: Moment) -> Commands:
    """The peer is known: ask it for the lease."""
    fetch.enter(CLAIMING, at.now)
    return [ev.SendClaim(fetch.fetch_id, at.timeout_s(fetch))]


def take_lease(fetch: Fetch, event: ev.LeaseGranted, at: Moment) -> Commands:
    """The first grant, or news of an offer that was not ready: read as soon as all is there."""
    try:
        fetch.hold(event.sent_at, event.granted)
    except GeometryError as error:
        return fail(fetch, error, at)
    wanted = fetch.requested.num_tokens
    if event.granted.sealed and event.granted.num_tokens < wanted:
        message = f"the offer has {event.granted.num_tokens} tokens, {wanted} were asked for"
        return fail(fetch, LocalError(message, num_tokens=event.granted.num_tokens), at)
    if not event.granted.sealed:
        if fetch.state is not WAITING:
            fetch.enter(WAITING, at.now)
        return ask_for_news(fetch, event, at) if fetch.hinted else []
    return _start_read(fetch, at)


def lengthen_lease(fetch: Fetch, event: ev.LeaseGranted, at: Moment) -> Commands:
    """A renewal while the read goes on."""
    try:
        fetch.hold(event.sent_at, event.granted)
    except GeometryError as error:
        return fail(fetch, error, at)
    return []


def retry_or_fail(fetch: Fetch, event: ev.StepFailed, at: Moment) -> Commands:
    """A claim that found the offer leased to another reader is tried again until the deadline."""
    if event.error.code is not ErrorCode.BUSY:
        return fail(fetch, event.error, at)
    fetch.claim_again_at = at.now + at.limits.busy_retry_s
    return []


def fail_step(fetch: Fetch, event: ev.StepFailed, at: Moment) -> Commands:
    """The step that this state waits for did not work."""
    return fail(fetch, event.error, at)


def note_renewal_failed(fetch: Fetch, event: ev.RenewFailed, at: Moment) -> Commands:
    """A renewal that timed out may be tried again while the lease lasts; a refused one ends it."""
    if event.error.code is not ErrorCode.TIMEOUT or fetch.held is None:
        return fail(fetch, event.error, at)
    fetch.held.renewing = False
    fetch.held.renew_at = at.now
    return _renew(fetch, at) if at.now < fetch.held.expires_at else []


def ask_for_news(fetch: Fetch, _event: ev.OfferAdvanced | ev.LeaseGranted, at: Moment) -> Commands:
    """A hint: renewing tells what is true. During a renewal, ask once more after it."""
    fetch.hinted = fetch.held is not None and fetch.held.renewing
    return _renew(fetch, at)


def note_hint(fetch: Fetch, _event: ev.OfferAdvanced, _: Moment) -> Commands:
    """News that may be newer than the grant on its way: ask once more after that."""
    fetch.hinted = True
    return []


def end_read(fetch: Fetch, event: ev.ReadEnded, at: Moment) -> Commands:
    """All bytes have landed, or the fabric failed: confirm, or fail with nothing in flight."""
    fetch.read_in_flight = False
    fetch.num_bytes = event.num_bytes
    if event.error is not None:
        return fail(fetch, event.error, at)
    return _start_confirm(fetch, at)


def complete(fetch: Fetch, _event: ev.LeaseConfirmed, at: Moment) -> Commands:
    """The KV is valid: the only way to this state."""
    fetch.enter(COMPLETED, at.now)
    return [fetch.report(Outcome.COMPLETED, COMPLETED, blocks_free=True)]


def cancel(fetch: Fetch, event: ev.CancelRequested, at: Moment) -> Commands:
    """The engine gave up: say yes, and end."""
    error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
    return [ev.Reply(event.reply_to, Empty()), *fail(fetch, error, at, ends_as=CANCELLED)]


def accept_late_cancel(_fetch: Fetch, event: ev.CancelRequested, _: Moment) -> Commands:
    """It has ended already; the notice says how."""
    return [ev.Reply(event.reply_to, Empty())]


def lose_peer(fetch: Fetch, _event: ev.PeerLost, at: Moment) -> Commands:
    """Nobody can grant or confirm any more."""
    return fail(fetch, RemoteError("the prefill agent is gone", code=ErrorCode.PEER_LOST), at)


def lose_engine(fetch: Fetch, _event: ev.EngineLost, at: Moment) -> Commands:
    """Nobody wants the KV any more."""
    return fail(fetch, RemoteError("the decode engine is gone", code=ErrorCode.ENGINE_LOST), at)


def stop(fetch: Fetch, _event: ev.Stopped, at: Moment) -> Commands:
    """The agent ends."""
    return fail(fetch, LocalError("the decode agent stops", code=ErrorCode.DRAINING), at)


def check_time(fetch: Fetch, _event: ev.DeadlinePassed, at: Moment) -> Commands:
    """The fetch's deadline, the lease's end, the next renewal, the next try of a busy claim."""
    if fetch.deadline <= at.now:
        message = f"the fetch did not end within its deadline, it was {fetch.state}"
        return fail(fetch, RemoteError(message, code=ErrorCode.TIMEOUT), at)
    if fetch.claim_again_at is not None and fetch.claim_again_at <= at.now:
        fetch.claim_again_at = None
        return [ev.SendClaim(fetch.fetch_id, at.timeout_s(fetch))]
    if fetch.held is None or fetch.state is CONFIRMING:
        return []
    if fetch.held.expires_at <= at.now:
        message = "the lease ended before the read did"
        return fail(fetch, RemoteError(message, code=ErrorCode.LEASE_EXPIRED), at)
    return _renew(fetch, at) if fetch.held.renew_at <= at.now else []


def finish_draining(fetch: Fetch, event: ev.ReadEnded, at: Moment) -> Commands:
    """The last transfer is terminal: the engine gets its blocks back, and the lease goes."""
    fetch.read_in_flight = False
    fetch.num_bytes = event.num_bytes
    fetch.enter(fetch.ends_as, at.now)
    freed = ev.ReportBlocksFreed(fetch.fetch_id, fetch.requested.engine_id)
    return [*_give_back(fetch), freed]


def give_back_late_lease(fetch: Fetch, event: ev.LeaseGranted, _: Moment) -> Commands:
    """A claim was granted after its fetch had ended: do not let the offer wait for its expiry."""
    if fetch.held is not None and fetch.held.epoch == event.granted.epoch:
        return []
    code = fetch.error.code if fetch.error else ErrorCode.CANCELLED
    return [ev.SendRelease(fetch.requested.ticket, event.granted.epoch, code)]


def ignore(_fetch: Fetch, _event: ev.Event, _: Moment) -> Commands:
    """Comes too late to matter, or is a hint that this state does not need."""
    return []


def fail(fetch: Fetch, error: KVBusError, at: Moment, *, ends_as: FetchState = FAILED) -> Commands:
    """Report the end now; while transfers are in flight the blocks come later, by draining."""
    stage = fetch.state
    fetch.error = error
    fetch.ends_as = ends_as
    fetch.enter(DRAINING if fetch.read_in_flight else ends_as, at.now)
    outcome = Outcome.CANCELLED if ends_as is CANCELLED else Outcome.FAILED
    report = fetch.report(outcome, stage, blocks_free=not fetch.read_in_flight)
    if fetch.read_in_flight:
        return [ev.AbortRead(fetch.fetch_id), report]
    return [*_give_back(fetch), report]


def _give_back(fetch: Fetch) -> Commands:
    if fetch.held is None or fetch.error is None:
        return []
    return [ev.SendRelease(fetch.requested.ticket, fetch.held.epoch, fetch.error.code)]


def _renew(fetch: Fetch, at: Moment) -> Commands:
    if fetch.held is None or fetch.held.renewing:
        return []
    fetch.held.renewing = True
    known = {group: len(table) for group, table in fetch.tables.items()}
    return [ev.SendRenew(fetch.fetch_id, fetch.held.epoch, at.timeout_s(fetch), known)]


def _start_read(fetch: Fetch, at: Moment) -> Commands:
    if fetch.num_tokens_to_read == 0:
        return _start_confirm(fetch, at)
    fetch.enter(READING, at.now)
    fetch.read_in_flight = True
    return [ev.StartRead(fetch.fetch_id, dict(fetch.tables))]


def _start_confirm(fetch: Fetch, at: Moment) -> Commands:
    fetch.enter(CONFIRMING, at.now)
    epoch = fetch.held.epoch if fetch.held else 0
    return [ev.SendConfirm(fetch.fetch_id, epoch, at.timeout_s(fetch))]


def _table() -> Mapping[tuple[FetchState, type[ev.Event]], Transition]:
    rows: dict[tuple[FetchState, type[ev.Event]], Transition] = {}
    for state in FetchState:
        rows |= {(state, kind): Transition(ignore, (state,)) for kind in IGNORED_BY_DEFAULT}
    for state in STAGES:
        ends = (DRAINING,) if state is READING else (FAILED,)
        stays = () if state in (RESOLVING, CONFIRMING) else (state,)
        rows[state, ev.CancelRequested] = Transition(
            cancel, (DRAINING,) if state is READING else (CANCELLED,)
        )
        rows[state, ev.PeerLost] = Transition(lose_peer, ends)
        rows[state, ev.EngineLost] = Transition(lose_engine, ends)
        rows[state, ev.Stopped] = Transition(stop, ends)
        rows[state, ev.StepFailed] = Transition(fail_step, ends)
        rows[state, ev.DeadlinePassed] = Transition(check_time, (*stays, *ends))
    for state in (DRAINING, *ENDS):
        rows[state, ev.CancelRequested] = Transition(accept_late_cancel, (state,))
        rows[state, ev.LeaseGranted] = Transition(give_back_late_lease, (state,))
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
    ev.PeerLost,
    ev.EngineLost,
    ev.Stopped,
    ev.DeadlinePassed,
)

SPECIFIC: Mapping[tuple[FetchState, type[ev.Event]], Transition] = {
    (RESOLVING, ev.PeerReady): Transition(start_claim, (CLAIMING,)),
    (CLAIMING, ev.LeaseGranted): Transition(take_lease, (WAITING, READING, CONFIRMING, FAILED)),
    (CLAIMING, ev.StepFailed): Transition(retry_or_fail, (CLAIMING, FAILED)),
    (CLAIMING, ev.OfferAdvanced): Transition(note_hint, (CLAIMING,)),
    (WAITING, ev.LeaseGranted): Transition(take_lease, (WAITING, READING, CONFIRMING, FAILED)),
    (WAITING, ev.OfferAdvanced): Transition(ask_for_news, (WAITING,)),
    (WAITING, ev.RenewFailed): Transition(note_renewal_failed, (WAITING, FAILED)),
    (READING, ev.LeaseGranted): Transition(lengthen_lease, (READING, DRAINING)),
    (READING, ev.OfferAdvanced): Transition(ask_for_news, (READING,)),
    (READING, ev.RenewFailed): Transition(note_renewal_failed, (READING, DRAINING)),
    (READING, ev.ReadEnded): Transition(end_read, (CONFIRMING, FAILED)),
    (CONFIRMING, ev.LeaseConfirmed): Transition(complete, (COMPLETED,)),
    (DRAINING, ev.ReadEnded): Transition(finish_draining, (FAILED, CANCELLED)),
}

TRANSITIONS = _table()
