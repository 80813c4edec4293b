"""What handlers of several states do to a fetch: go on, ask, renew, fail.

Refuses to say when: `kvbus_decode.fetch.transitions` does.
"""

from typing import Any

from kvbus.errors import ErrorCode, KVBusError, RequestRefused
from kvbus.protocol.engine import Outcome
from kvbus.protocol.peer import Claim, Forgo, Meet, PeerWithdraw, Release, Renew, Take
from kvbus.protocol.ticket import Ticket
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import ENDS, Context, FetchEntry, FetchState

CLAIMING, WAITING = FetchState.CLAIMING, FetchState.WAITING
READING, TAKING, DRAINING = FetchState.READING, FetchState.TAKING, FetchState.DRAINING
COMPLETED, FAILED, CANCELLED = ENDS

Commands = list[ev.Command]

MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 2.0
WAIT = 0.8
"""Of the time that a request for a ticket has, the part that the prefill agent may wait."""


def go_on(fetch: FetchEntry, at: Context) -> Commands:
    """Nothing is in flight here: read what is ready, or take what was all, or wait for more.

    The parts of other agents are waited for, too. Read ahead of the lease: what became of the claim
    is waited for.
    """
    fetch.chunk = fetch.next_chunk()
    if fetch.chunk is not None:
        fetch.enter(READING, at.now)
        return [fetch.chunk]
    if not fetch.sealed or fetch.claiming or fetch.asking:
        fetch.enter(CLAIMING if fetch.claiming else WAITING, at.now)
        return []
    fetch.enter(TAKING, at.now)
    return [ask_for_yes(fetch, at)]


def meet(fetch: FetchEntry, at: Context) -> ev.Ask:
    """Ask for the ticket of an offer that may not have been made yet."""
    timeout_s = fetch.request_timeout_s(at)
    name = fetch.requested.ticket.secret  # the rendezvous says no more of the ticket
    return ev.Ask(fetch.requested, Meet(transfer_id=name, wait_s=WAIT * timeout_s), timeout_s)


def claim(fetch: FetchEntry, at: Context) -> ev.Ask:
    """Ask for the lease; news that came before are in its reply."""
    fetch.claiming, fetch.hinted = True, False
    message = Claim(
        **_offer(fetch),
        **_reader(fetch, at),
        secret=fetch.requested.ticket.secret,
        lease_s=at.limits.lease_s,
    )
    return ev.Ask(fetch.requested, message, fetch.request_timeout_s(at))


def _offer(fetch: FetchEntry) -> dict[str, Any]:
    ticket = fetch.requested.ticket
    return {"agent_boot": ticket.agent_boot, "offer_id": ticket.offer_id}


def _reader(fetch: FetchEntry, at: Context) -> dict[str, Any]:
    agent_id, boot = at.limits.reader_agent, at.limits.reader_boot
    return {
        "reader_id": f"{boot}/{fetch.fetch_id}",
        "reader_agent": agent_id,
        "reader_boot": boot,
        "part": bool(fetch.requested.access),
    }


def pause_s(event: ev.Answered, at: Context) -> float:
    """How long to wait before it is asked again: as the prefill agent says, or by our config.

    At least a millisecond and at most a few seconds, whatever an agent says; up to twice as long,
    by luck.
    """
    hint = event.error.detail.get("retry_after_s") if event.error is not None else None
    least_s = hint if isinstance(hint, int | float) else at.limits.busy_retry_s
    # In this order: a hint may be no number at all.
    return min(max(MIN_PAUSE_S, least_s), MAX_PAUSE_S) * (1 + event.luck)


def ask_for_yes(fetch: FetchEntry, at: Context) -> ev.Ask:
    """All has landed: ask whether it is good.

    While only the ticket names the blocks, have them compared; a lease names the offer's own.
    """
    timeout_s = fetch.yes_timeout_s(at)
    fetch.hinted, fetch.ask_again_at = False, None
    message = Take(
        **_offer(fetch),
        **_reader(fetch, at),
        secret=fetch.requested.ticket.secret,
        token=fetch.requested.take_token,
        tables=dict(fetch.tables) if fetch.held is None or fetch.in_doubt else None,
    )
    return ev.Ask(fetch.requested, message, timeout_s)


def renew(fetch: FetchEntry, at: Context) -> Commands:
    """Ask for more time and news, unless that is asked already; answers every hint so far."""
    if fetch.held is None or fetch.held.renewing:
        return []
    fetch.held.renewing = True
    fetch.hinted = False
    tables = {} if fetch.in_doubt else fetch.tables
    message = Renew(
        **_offer(fetch),
        epoch=fetch.held.epoch,
        token=fetch.held.token,
        lease_s=at.limits.lease_s,
        known_blocks={group: len(table) for group, table in tables.items()},
    )
    return [ev.Ask(fetch.requested, message, fetch.request_timeout_s(at))]


def fail(
    fetch: FetchEntry, error: KVBusError, at: Context, *, ends_as: FetchState = FAILED
) -> Commands:
    """Report the end now; while something is in flight the blocks come later, by draining."""
    stage, in_flight = fetch.state, fetch.in_flight
    undecided = fetch.is_undecided and not isinstance(error, RequestRefused)
    fetch.error = error
    fetch.ends_as = ends_as
    fetch.enter(DRAINING if in_flight else ends_as, at.now)
    outcome = Outcome.CANCELLED if ends_as is CANCELLED else Outcome.FAILED
    report = fetch.report(outcome, stage, blocks_free=not in_flight, undecided=undecided)
    if in_flight:
        stops: Commands = [ev.StopOthers(fetch.fetch_id)] if fetch.asking else []
        if fetch.chunk is not None:
            stops.append(ev.StopRead(fetch.fetch_id))
        return [*stops, report]
    return [*release_lease(fetch), report]


def release_lease(fetch: FetchEntry) -> Commands:
    """Give the lease of a fetch back that has failed."""
    if fetch.held is None or fetch.error is None:
        return []
    return [release(fetch.requested.ticket, *fetch.lease, fetch.error.code)]


def release(ticket: Ticket, epoch: int, token: str, code: ErrorCode) -> ev.Tell:
    """Give a lease back."""
    message = Release(
        agent_boot=ticket.agent_boot,
        offer_id=ticket.offer_id,
        epoch=epoch,
        token=token,
        code=code.value,
    )
    return ev.Tell(ticket, message)


def withdraw(fetch: FetchEntry, event: ev.CancelRequested) -> Commands:
    """A completed fetch has ended its offer by its take."""
    if not event.release_offer or fetch.state is COMPLETED:
        return []
    ticket, meets = fetch.requested.ticket, fetch.requested.meets
    if meets is not None:
        return [ev.Tell(ticket, Forgo(transfer_id=meets.transfer_id))]
    return [ev.Tell(ticket, PeerWithdraw(**_offer(fetch), secret=ticket.secret))]
