"""What handlers of several states do to a fetch: go on, ask, renew, fail.

Refuses to say when: `kvbus_decode.fetch.transitions` does.
"""

from kvbus.errors import KVBusError, RequestRefused
from kvbus.protocol.engine import Outcome
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchEntry
from kvbus_decode.fetch.state import ENDS, Context, FetchState

CLAIMING, WAITING = FetchState.CLAIMING, FetchState.WAITING
READING, CONFIRMING, DRAINING = FetchState.READING, FetchState.CONFIRMING, FetchState.DRAINING
COMPLETED, FAILED, CANCELLED = ENDS

Commands = list[ev.Command]

MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 2.0


def go_on(fetch: FetchEntry, at: Context) -> Commands:
    """Nothing is in flight: read what is ready, or confirm when that was all, or wait for more.

    Read ahead of the lease: what became of the claim is waited for.
    """
    fetch.chunk = fetch.next_chunk()
    if fetch.chunk is not None:
        fetch.enter(READING, at.now)
        return [fetch.chunk]
    if not fetch.sealed or fetch.claiming:
        fetch.enter(CLAIMING if fetch.claiming else WAITING, at.now)
        return []
    fetch.enter(CONFIRMING, at.now)
    return [ask_for_yes(fetch, at)]


def meet(fetch: FetchEntry, at: Context) -> ev.SendMeet:
    """Ask for the ticket of an offer that may not have been made yet."""
    return ev.SendMeet(fetch.fetch_id, fetch.request_timeout_s(at), fetch.requested)


def claim(fetch: FetchEntry, at: Context) -> ev.SendClaim:
    """Ask for the lease; news that came before are in its reply."""
    fetch.claiming, fetch.hinted = True, False
    return ev.SendClaim(fetch.fetch_id, fetch.request_timeout_s(at), fetch.requested)


def pause_s(event: ev.StepFailed | ev.RenewFailed, at: Context) -> float:
    """How long to wait before it is asked again: as the prefill agent says, or by our config.

    At least a millisecond and at most a few seconds, whatever an agent says; up to twice as long,
    by luck.
    """
    hint = event.error.detail.get("retry_after_s")
    least_s = hint if isinstance(hint, int | float) else at.limits.busy_retry_s
    # In this order: a hint may be no number at all.
    return min(max(MIN_PAUSE_S, least_s), MAX_PAUSE_S) * (1 + event.luck)


def ask_for_yes(fetch: FetchEntry, at: Context) -> ev.SendConfirm | ev.SendTake:
    """All has landed: ask whether it is good, under the lease where there is one.

    While only the ticket names the blocks, have them compared.
    """
    timeout_s = fetch.yes_timeout_s(at)
    fetch.hinted, fetch.ask_again_at = False, None
    if fetch.held is None or fetch.in_doubt:
        return ev.SendTake(fetch.fetch_id, dict(fetch.tables), timeout_s)
    return ev.SendConfirm(fetch.fetch_id, *fetch.lease, timeout_s)


def renew(fetch: FetchEntry, at: Context) -> Commands:
    """Ask for more time and news, unless that is asked already; answers every hint so far."""
    if fetch.held is None or fetch.held.renewing:
        return []
    fetch.held.renewing = True
    fetch.hinted = False
    tables = {} if fetch.in_doubt else fetch.tables
    known = {group: len(table) for group, table in tables.items()}
    return [ev.SendRenew(fetch.fetch_id, *fetch.lease, fetch.request_timeout_s(at), known)]


def fail(
    fetch: FetchEntry, error: KVBusError, at: Context, *, ends_as: FetchState = FAILED
) -> Commands:
    """Report the end now; while a chunk is in flight the blocks come later, by draining."""
    stage, in_flight = fetch.state, fetch.chunk is not None
    undecided = fetch.is_undecided and not isinstance(error, RequestRefused)
    fetch.error = error
    fetch.ends_as = ends_as
    fetch.enter(DRAINING if in_flight else ends_as, at.now)
    outcome = Outcome.CANCELLED if ends_as is CANCELLED else Outcome.FAILED
    report = fetch.report(outcome, stage, blocks_free=not in_flight, undecided=undecided)
    if in_flight:
        return [ev.StopRead(fetch.fetch_id), report]
    return [*release_lease(fetch), report]


def release_lease(fetch: FetchEntry) -> Commands:
    """Give the lease of a fetch back that has failed."""
    if fetch.held is None or fetch.error is None:
        return []
    return [ev.SendRelease(fetch.requested.ticket, *fetch.lease, fetch.error.code)]


def withdraw(fetch: FetchEntry, event: ev.CancelRequested) -> Commands:
    """A completed fetch has ended its offer by its confirm."""
    if not event.release_offer or fetch.state is COMPLETED:
        return []
    if fetch.requested.meets is not None:
        return [ev.SendForgo(fetch.requested.meets)]
    return [ev.SendWithdraw(fetch.requested.ticket)]
