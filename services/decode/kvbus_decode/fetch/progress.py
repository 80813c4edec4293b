"""What brings a fetch forward: a route, a lease, news of the offer, pieces that have landed, a yes.

Refuses to read ahead: a piece is what the prefill agent said is ready, and only a sealed offer is
confirmed.
"""

from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.protocol.engine import Outcome
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.context import Commands, Context
from kvbus_decode.fetch.endings import fail
from kvbus_decode.fetch.entry import FetchEntry, FetchState


def start_claim(fetch: FetchEntry, _event: ev.PeerReady, at: Context) -> Commands:
    """The peer is known: ask it for the lease."""
    fetch.enter(FetchState.CLAIMING, at.now)
    return [ev.SendClaim(fetch.fetch_id, at.timeout_s(fetch))]


def take_grant(fetch: FetchEntry, event: ev.LeaseGranted, at: Context) -> Commands:
    """The lease, or more of it, and what the offer has by now; during a piece that waits."""
    try:
        fetch.hold(event.sent_at, event.granted)
    except KVBusError as error:
        return fail(fetch, error, at)
    commands = [] if fetch.piece is not None else _go_on(fetch, at)
    return [*commands, *_renew(fetch, at)] if fetch.hinted and not fetch.sealed else commands


def retry_or_fail(fetch: FetchEntry, event: ev.StepFailed, at: Context) -> Commands:
    """A claim that found the offer leased to another reader is tried again until the deadline."""
    if event.error.code is not ErrorCode.BUSY:
        return fail(fetch, event.error, at)
    fetch.claim_again_at = at.now + at.limits.busy_retry_s
    return []


def note_renewal_failed(fetch: FetchEntry, event: ev.RenewFailed, at: Context) -> Commands:
    """A renewal that timed out may be tried again while the lease lasts; a refused one ends it."""
    if event.error.code is not ErrorCode.TIMEOUT or fetch.held is None:
        return fail(fetch, event.error, at)
    fetch.held.renewing = False
    fetch.held.renew_at = at.now
    return _renew(fetch, at) if at.now < fetch.held.expires_at else []


def ask_for_news(fetch: FetchEntry, _event: ev.OfferAdvanced, at: Context) -> Commands:
    """A hint: renewing tells what is true. During a renewal, ask once more after it."""
    fetch.hinted = True
    return _renew(fetch, at)


def note_hint(fetch: FetchEntry, _event: ev.OfferAdvanced, _: Context) -> Commands:
    """News that may be newer than the grant on its way: ask once more after that."""
    fetch.hinted = True
    return []


def end_piece(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    """A piece has landed: on to the next; or the fabric failed, and nothing is in flight."""
    fetch.land(event)
    if event.error is not None:
        return fail(fetch, event.error, at)
    commands = _go_on(fetch, at)
    if fetch.requested.piece_tokens:
        commands.append(ev.ReportLanded(fetch.fetch_id, fetch.read_to))
    return commands


def complete(fetch: FetchEntry, _event: ev.LeaseConfirmed, at: Context) -> Commands:
    """The KV is valid: the only way to this state."""
    fetch.enter(FetchState.COMPLETED, at.now)
    return [fetch.report(Outcome.COMPLETED, FetchState.COMPLETED, blocks_free=True)]


def check_time(fetch: FetchEntry, _event: ev.DeadlinePassed, at: Context) -> Commands:
    """The fetch's deadline, the lease's end, the next renewal, the next try of a busy claim."""
    if fetch.deadline <= at.now:
        message = f"the fetch did not end within its deadline, it was {fetch.state}"
        return fail(fetch, RemoteError(message, code=ErrorCode.TIMEOUT), at)
    if fetch.claim_again_at is not None and fetch.claim_again_at <= at.now:
        fetch.claim_again_at, fetch.hinted = None, False
        return [ev.SendClaim(fetch.fetch_id, at.timeout_s(fetch))]
    if fetch.held is None or fetch.state is FetchState.CONFIRMING:
        return []
    if fetch.held.expires_at <= at.now:
        message = "the lease ended before the read did"
        return fail(fetch, RemoteError(message, code=ErrorCode.LEASE_EXPIRED), at)
    return _renew(fetch, at) if fetch.held.renew_at <= at.now else []


def _go_on(fetch: FetchEntry, at: Context) -> Commands:
    """Nothing is in flight: read what is ready, or confirm when that was all, or wait for more."""
    fetch.piece = fetch.next_piece()
    if fetch.piece is not None:
        fetch.enter(FetchState.READING, at.now)
        return [fetch.piece]
    if fetch.sealed:
        return _start_confirm(fetch, at)
    fetch.enter(FetchState.WAITING, at.now)
    return []


def _renew(fetch: FetchEntry, at: Context) -> Commands:
    """Ask for more time and news, unless that is asked already; answers every hint so far."""
    if fetch.held is None or fetch.held.renewing:
        return []
    fetch.held.renewing = True
    fetch.hinted = False
    known = {group: len(table) for group, table in fetch.tables.items()}
    return [ev.SendRenew(fetch.fetch_id, fetch.held.epoch, at.timeout_s(fetch), known)]


def _start_confirm(fetch: FetchEntry, at: Context) -> Commands:
    fetch.enter(FetchState.CONFIRMING, at.now)
    epoch = fetch.held.epoch if fetch.held else 0
    return [ev.SendConfirm(fetch.fetch_id, epoch, at.timeout_s(fetch))]
