"""How a fetch ends without its KV, and what can still come after the end.

Refuses to free blocks under a transfer: while a piece is in flight the end is reported at once,
and the blocks when the piece is terminal.
"""

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.protocol.engine import Outcome
from kvbus.protocol.message import Empty
from kvbus_decode import fetch_events as ev
from kvbus_decode.fetch import Fetch, FetchState
from kvbus_decode.moment import Commands, Moment


def fail(
    fetch: Fetch, error: KVBusError, at: Moment, *, ends_as: FetchState = FetchState.FAILED
) -> Commands:
    """Report the end now; while a piece is in flight the blocks come later, by draining."""
    stage, in_flight = fetch.state, fetch.piece is not None
    fetch.error = error
    fetch.ends_as = ends_as
    fetch.enter(FetchState.DRAINING if in_flight else ends_as, at.now)
    outcome = Outcome.CANCELLED if ends_as is FetchState.CANCELLED else Outcome.FAILED
    report = fetch.report(outcome, stage, blocks_free=not in_flight)
    if in_flight:
        return [ev.AbortRead(fetch.fetch_id), report]
    return [*_give_back(fetch), report]


def fail_step(fetch: Fetch, event: ev.StepFailed, at: Moment) -> Commands:
    """The step that this state waits for did not work."""
    return fail(fetch, event.error, at)


def cancel(fetch: Fetch, event: ev.CancelRequested, at: Moment) -> Commands:
    """The engine gave up: say yes, and end."""
    error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
    return [
        ev.Reply(event.reply_to, Empty()),
        *fail(fetch, error, at, ends_as=FetchState.CANCELLED),
    ]


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


def finish_draining(fetch: Fetch, event: ev.ReadEnded, at: Moment) -> Commands:
    """The last transfer is terminal: the engine gets its blocks back, and the lease goes."""
    fetch.land(event)
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


def _give_back(fetch: Fetch) -> Commands:
    if fetch.held is None or fetch.error is None:
        return []
    return [ev.SendRelease(fetch.requested.ticket, fetch.held.epoch, fetch.error.code)]
