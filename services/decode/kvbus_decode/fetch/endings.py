"""How a fetch ends without its KV, and what can still come after the end.

Refuses to free blocks under a transfer: while a piece is in flight the end is reported at once,
and the blocks when the piece is terminal.
"""

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.protocol.engine import Outcome
from kvbus.protocol.message import Empty
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.context import Commands, Context
from kvbus_decode.fetch.entry import FetchEntry, FetchState


def fail(
    fetch: FetchEntry, error: KVBusError, at: Context, *, ends_as: FetchState = FetchState.FAILED
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
    return [*_release_lease(fetch), report]


def fail_step(fetch: FetchEntry, event: ev.StepFailed, at: Context) -> Commands:
    """The step that this state waits for did not work."""
    return fail(fetch, event.error, at)


def cancel(fetch: FetchEntry, event: ev.CancelRequested, at: Context) -> Commands:
    """The engine gave up: say yes, and end."""
    error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
    return [
        ev.SendReply(event.reply_to, Empty()),
        *fail(fetch, error, at, ends_as=FetchState.CANCELLED),
    ]


def accept_late_cancel(_fetch: FetchEntry, event: ev.CancelRequested, _: Context) -> Commands:
    """It has ended already; the notice says how."""
    return [ev.SendReply(event.reply_to, Empty())]


def lose_peer(fetch: FetchEntry, _event: ev.PeerGone, at: Context) -> Commands:
    """Nobody can grant or confirm any more."""
    return fail(fetch, RemoteError("the prefill agent is gone", code=ErrorCode.PEER_LOST), at)


def lose_engine(fetch: FetchEntry, _event: ev.EngineLost, at: Context) -> Commands:
    """Nobody wants the KV any more."""
    return fail(fetch, RemoteError("the decode engine is gone", code=ErrorCode.ENGINE_LOST), at)


def stop(fetch: FetchEntry, _event: ev.Stopped, at: Context) -> Commands:
    """The agent ends."""
    return fail(fetch, LocalError("the decode agent stops", code=ErrorCode.DRAINING), at)


def finish_draining(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    """The last transfer is terminal: the engine gets its blocks back, and the lease goes."""
    fetch.land(event)
    fetch.enter(fetch.ends_as, at.now)
    freed = ev.ReportBlocksFreed(fetch.fetch_id, fetch.requested.engine_id)
    return [*_release_lease(fetch), freed]


def give_back_late_lease(fetch: FetchEntry, event: ev.LeaseGranted, _: Context) -> Commands:
    """A claim was granted after its fetch had ended: do not let the offer wait for its expiry."""
    if fetch.held is not None and fetch.held.epoch == event.granted.epoch:
        return []
    code = fetch.error.code if fetch.error else ErrorCode.CANCELLED
    return [ev.SendRelease(fetch.requested.ticket, event.granted.epoch, code)]


def ignore(_fetch: FetchEntry, _event: ev.Event, _: Context) -> Commands:
    """Comes too late to matter, or is a hint that this state does not need."""
    return []


def _release_lease(fetch: FetchEntry) -> Commands:
    if fetch.held is None or fetch.error is None:
        return []
    return [ev.SendRelease(fetch.requested.ticket, fetch.held.epoch, fetch.error.code)]
