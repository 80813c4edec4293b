"""Which event does what to a fetch in which state: the table, and its handlers.

An event that comes too late for its fetch changes nothing, but a lease that it brings is given
back. Every handler returns the commands for the agent, in order.

Blocks are never freed under a read: while a chunk is in flight the end is reported at once, and the
blocks when the read has ended (draining). A chunk is what the prefill agent said is ready, in a
grant or in the ticket (`Ahead`), and only a sealed offer is taken. A fetch
claims, or reads ahead, when the table says that it has its turn.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.protocol.engine import Outcome
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import Claim, Granted, Meet, Renew, Take
from kvbus.protocol.ticket import Ticket
from kvbus.table import Transition
from kvbus.table.events import DeadlinePassed, EngineLost, SendReply, Stopped
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import ENDS, STAGES, Context, FetchEntry, FetchState
from kvbus_decode.fetch.steps import (
    Commands,
    ask_for_yes,
    claim,
    fail,
    go_on,
    meet,
    pause_s,
    release,
    release_lease,
    renew,
    withdraw,
)

MEETING, RESOLVING, QUEUED = FetchState.MEETING, FetchState.RESOLVING, FetchState.QUEUED
CLAIMING, WAITING = FetchState.CLAIMING, FetchState.WAITING
READING, TAKING, DRAINING = FetchState.READING, FetchState.TAKING, FetchState.DRAINING
COMPLETED, FAILED, CANCELLED = ENDS

REASON_SHARE = 0.9
"""Of the time that is left, for the peer to be found: who is not says more than a deadline does."""

READ_HINT = (
    ": not all bytes have come. If none ever do, see whether both hosts reach each other on what "
    "data_interfaces names, with packets of full size (MTU); kvbus doctor --peer looks"
)
"""Requests get through, by another way or as they are small."""


def meet_first(fetch: FetchEntry, at: Context) -> Commands:
    """A new fetch of an offer that may not have been made yet."""
    fetch.state = MEETING
    return [meet(fetch, at)]


def take_ticket(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """The offer was made: from here on it is a fetch like any other."""
    if not isinstance(event.outcome, Ticket):
        return meet_again_or_fail(fetch, event, at)
    fetch.requested = replace(fetch.requested, ticket=event.outcome, meets=None)
    fetch.enter(RESOLVING, at.now)
    return [ev.ResolvePeer(fetch.fetch_id, fetch.request_timeout_s(at), fetch.requested)]


def meet_again_or_fail(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """There is no offer yet, or no answer: the engine may still compute. Ask until the deadline."""
    error = error_of(event)
    if error.code not in (ErrorCode.BUSY, ErrorCode.TIMEOUT):
        return fail(fetch, error, at)
    fetch.ask_again_at = at.now + pause_s(event, at)
    return []


def resolve(fetch: FetchEntry, at: Context) -> Commands:
    """A new fetch, whose peer is to be found."""
    requested, left_s = fetch.requested, fetch.deadline - at.now
    timeout_s = min(fetch.request_timeout_s(at), REASON_SHARE * left_s)
    return [ev.ResolvePeer(fetch.fetch_id, timeout_s, requested)]


def wait_for_turn(fetch: FetchEntry) -> Commands:
    """A new fetch whose route is known, while as many as may be are under way."""
    fetch.state = QUEUED
    return [ev.HoldPeer(fetch.fetch_id, fetch.requested)]


def begin(fetch: FetchEntry, at: Context) -> Commands:
    """A new fetch whose turn it is.

    Its peers are held by what it asks, where it asks at once.
    """
    commands = start(fetch, ev.TurnCame(fetch.fetch_id), at)
    asks = any(isinstance(command, ev.Ask) for command in commands)
    holds: Commands = [] if asks else [ev.HoldPeer(fetch.fetch_id, fetch.requested)]
    return [*holds, *commands]


def queue(fetch: FetchEntry, _event: ev.PeerReady, at: Context) -> Commands:
    """The peer is known: the claim waits for its turn, which may come at once."""
    fetch.enter(QUEUED, at.now)
    return []


def start(fetch: FetchEntry, _event: ev.TurnCame, at: Context) -> Commands:
    """It may begin: read what the ticket names, or ask for the lease."""
    ahead = fetch.requested.ahead
    if ahead is not None:
        return _start_ahead(fetch, ahead, at)
    fetch.enter(CLAIMING, at.now)
    return [claim(fetch, at)]


def _start_ahead(fetch: FetchEntry, ahead: ev.Ahead, at: Context) -> Commands:
    """Read what the ticket names; with the claim beside it, or after a while, or not at all.

    An engine that has it all only takes the offer.
    """
    fetch.know(ahead)
    commands = go_on(fetch, at)
    if fetch.chunk is None:
        return commands
    if ahead.claims:
        return [claim(fetch, at), *commands]
    fetch.ask_again_at = at.now + at.limits.claim_after_s
    return commands


def take_grant(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """The lease, or more of it, and what the offer has by now; during a chunk that waits."""
    if not isinstance(event.outcome, Granted):
        is_claim = isinstance(event.message, Claim)
        return (retry_or_fail if is_claim else note_renewal_failed)(fetch, event, at)
    is_first = fetch.held is None
    if isinstance(event.message, Claim):
        fetch.claiming = False
    try:
        fetch.hold(event.sent_at, event.outcome)
    except KVBusError as error:
        return fail(fetch, error, at)
    fetch.asking = fetch.asking or (is_first and bool(fetch.requested.others))
    asks: Commands = [ev.AskOthers(fetch.fetch_id)] if is_first and fetch.asking else []
    commands = asks if fetch.chunk is not None else [*asks, *go_on(fetch, at)]
    return [*commands, *renew(fetch, at)] if fetch.hinted and not fetch.sealed else commands


def retry_or_fail(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """A claim that found the offer leased to another reader is tried again until the deadline.

    A read that is under way meanwhile goes on: the other one may give the offer back, and until
    somebody completes it the bytes are good.
    """
    error = error_of(event)
    if error.code is not ErrorCode.BUSY or not fetch.claiming:
        return fail(fetch, error, at)
    if fetch.hinted:  # the other lease may have ended while the answer was on its way
        return [claim(fetch, at)]
    fetch.claiming, fetch.ask_again_at = False, at.now + pause_s(event, at)
    return []


def note_renewal_failed(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """One that timed out, or found its agent busy, is tried again while the lease lasts.

    Any other refusal ends the fetch.
    """
    error = error_of(event)
    is_busy = error.code is ErrorCode.BUSY
    if fetch.held is None or not (is_busy or error.code is ErrorCode.TIMEOUT):
        return fail(fetch, error, at)
    fetch.held.renewing = False
    fetch.held.renew_at = at.now + (pause_s(event, at) if is_busy else 0.0)
    if is_busy:
        return []
    return renew(fetch, at) if at.now < fetch.held.expires_at else []


def error_of(event: ev.Answered) -> KVBusError:
    """Why it did not work."""
    return event.error or RemoteError("the reply is of another kind", code=ErrorCode.INVALID)


def ask_for_news(fetch: FetchEntry, _event: ev.OfferAdvanced, at: Context) -> Commands:
    """A hint: renewing tells what is true. During a renewal, ask once more after it."""
    fetch.hinted = True
    return renew(fetch, at)


def note_hint(fetch: FetchEntry, _event: ev.OfferAdvanced, _: Context) -> Commands:
    """News that may be newer than the grant on its way: ask once more after that."""
    fetch.hinted = True
    return []


def end_chunk(fetch: FetchEntry, event: ev.ChunkRead, at: Context) -> Commands:
    """A chunk has landed: on to the next; or the fabric failed, and nothing is in flight."""
    fetch.land(event)
    if event.error is not None:
        return fail(fetch, event.error, at)
    return [*go_on(fetch, at), *_landed(fetch)]


def end_others(fetch: FetchEntry, event: ev.OthersEnded, at: Context) -> Commands:
    """All other agents have fetched their parts: what has landed here has landed everywhere."""
    fetch.end_others(event)
    return [*([] if fetch.in_flight else go_on(fetch, at)), *_landed(fetch)]


def _landed(fetch: FetchEntry) -> Commands:
    """Tell the engine of tokens that are in the blocks of all ranks, if it wants to know."""
    if not fetch.requested.asked.chunk_tokens or not fetch.num_read or fetch.asking:
        return []
    return [ev.ReportLanded(fetch.fetch_id, fetch.read_to)]


def complete(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """A yes says that the KV is valid: the only way to this state."""
    if event.error is not None:
        return take_again_or_fail(fetch, event, at)
    fetch.enter(COMPLETED, at.now)
    return [fetch.report(Outcome.COMPLETED, COMPLETED, blocks_free=True)]


def check_time(fetch: FetchEntry, _event: DeadlinePassed, at: Context) -> Commands:
    """The fetch's deadline, the lease's end, the next renewal, the next claim or take."""
    if fetch.ends_at <= at.now:
        return fail(fetch, _overdue(fetch), at)
    if fetch.ask_again_at is not None and fetch.ask_again_at <= at.now:
        fetch.ask_again_at = None
        if fetch.state is MEETING:
            return [meet(fetch, at)]
        return [ask_for_yes(fetch, at) if fetch.state is TAKING else claim(fetch, at)]
    if fetch.held is None or fetch.state is TAKING:
        return []
    if fetch.held.expires_at <= at.now:
        message = "the lease ended before the read did"
        return fail(fetch, RemoteError(message, code=ErrorCode.LEASE_EXPIRED), at)
    return renew(fetch, at) if fetch.held.renew_at <= at.now else []


def _overdue(fetch: FetchEntry) -> RemoteError:
    message = f"the fetch did not end within its deadline, it was {fetch.state}"
    if fetch.state is READING:
        message += READ_HINT
    return RemoteError(message, code=ErrorCode.TIMEOUT)


def fail_step(fetch: FetchEntry, event: ev.StepFailed, at: Context) -> Commands:
    """The step that this state waits for did not work."""
    return fail(fetch, event.error, at)


def take_again_or_fail(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """No reply may mean that the offer is completed: ask until the deadline. A yes stays a yes.

    A take that came before the seal, or found another reader's lease, is sent again when there is
    news, or after a while: they may get lost. After the deadline nothing is.
    """
    error = error_of(event)
    is_early = error.code in (ErrorCode.BUSY, ErrorCode.OFFER_OPEN) and fetch.in_doubt
    if not is_early and error.code is not ErrorCode.TIMEOUT:
        return fail(fetch, error, at)
    if is_early:
        fetch.ask_again_at = at.now + pause_s(event, at)
    if fetch.deadline <= at.now:
        return fail(fetch, _overdue(fetch), at)
    return [] if is_early and not fetch.hinted else [ask_for_yes(fetch, at)]


def take_again_at_news(fetch: FetchEntry, event: ev.OfferAdvanced, at: Context) -> Commands:
    """The offer may be sealed now, or free; news that come before the reply are newer than it."""
    return note_hint(fetch, event, at) if fetch.is_undecided else [ask_for_yes(fetch, at)]


def claim_at_news(fetch: FetchEntry, event: ev.OfferAdvanced, at: Context) -> Commands:
    """As `take_again_at_news`, of the claim."""
    if fetch.ask_again_at is None:
        return note_hint(fetch, event, at)
    fetch.ask_again_at = None
    return [claim(fetch, at)]


def cancel(fetch: FetchEntry, event: ev.CancelRequested, at: Context) -> Commands:
    """The engine gave up: say yes, and end."""
    error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
    return [
        SendReply(event.reply_to, Empty()),
        *fail(fetch, error, at, ends_as=CANCELLED),
        *withdraw(fetch, event),
    ]


def lose_peer(fetch: FetchEntry, _event: ev.PeerGone, at: Context) -> Commands:
    """Nobody can grant or say yes any more."""
    return fail(fetch, RemoteError("the prefill agent is gone", code=ErrorCode.PEER_LOST), at)


def lose_engine(fetch: FetchEntry, _event: EngineLost, at: Context) -> Commands:
    """Nobody wants the KV any more; each agent sees to the memory that is there."""
    stops: Commands = [ev.StopOthers(fetch.fetch_id)] if fetch.asking else []
    fetch.asking = False
    ended = fail(fetch, RemoteError("the decode engine is gone", code=ErrorCode.ENGINE_LOST), at)
    return [*stops, *ended]


def stop(fetch: FetchEntry, _event: Stopped, at: Context) -> Commands:
    """The agent ends."""
    return fail(fetch, LocalError("the decode agent stops", code=ErrorCode.DRAINING), at)


def finish_draining(fetch: FetchEntry, event: ev.ChunkRead, at: Context) -> Commands:
    """The last transfer here is terminal."""
    fetch.land(event)
    return _free(fetch, at)


def end_late_others(fetch: FetchEntry, event: ev.OthersEnded, at: Context) -> Commands:
    """No other agent writes any more."""
    fetch.end_others(event)
    return _free(fetch, at)


def abandon_others(fetch: FetchEntry, _event: EngineLost, at: Context) -> Commands:
    """The other agents lose the engine as well, and see to the memory that they have."""
    was_asking, fetch.asking = fetch.asking, False
    return _free(fetch, at) if was_asking else []


def _free(fetch: FetchEntry, at: Context) -> Commands:
    """Once nothing is in flight the engine gets its blocks back, and the lease goes."""
    if fetch.in_flight:
        return []
    fetch.enter(fetch.ends_as, at.now)
    freed = ev.ReportBlocksFreed(fetch.fetch_id, fetch.requested.engine_id)
    return [*release_lease(fetch), freed]


def accept_late_cancel(fetch: FetchEntry, event: ev.CancelRequested, _: Context) -> Commands:
    """It has ended already, as its answer says. Its offer may still wait for another reader."""
    return [SendReply(event.reply_to, Empty()), *withdraw(fetch, event)]


def release_late_lease(fetch: FetchEntry, event: ev.Answered, _: Context) -> Commands:
    """A claim was granted after its fetch had ended: do not let the offer wait for its expiry."""
    granted = event.outcome
    if not isinstance(granted, Granted):
        return []
    if fetch.held is not None and fetch.held.epoch == granted.epoch:
        return []
    code = fetch.error.code if fetch.error else ErrorCode.CANCELLED
    return [release(event.ticket, granted.epoch, granted.token, code)]


def keep_late_lease(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """While it lives, the prefill agent drives the read that drains; it goes back after that."""
    if fetch.held is not None or not isinstance(event.outcome, Granted):
        return release_late_lease(fetch, event, at)
    fetch.receive(event.sent_at, event.outcome)
    return []


def ignore(_fetch: FetchEntry, _event: ev.Event, _: Context) -> Commands:
    """Comes too late to matter, or is a hint that this state does not need."""
    return []


Kind = type[Any]
"""Of an event; an answer is known by the class of its question."""


def _table() -> Mapping[tuple[FetchState, Kind], Transition[FetchState]]:
    rows: dict[tuple[FetchState, Kind], Transition[FetchState]] = {}
    for state in FetchState:
        rows |= {(state, kind): Transition(ignore, (state,)) for kind in IGNORED_BY_DEFAULT}
    for state in STAGES:
        drains = {READING: (DRAINING,), WAITING: (DRAINING, FAILED)}
        ends = drains.get(state, (FAILED,))
        stays = () if state in (RESOLVING, QUEUED) else (state,)
        rows[state, ev.CancelRequested] = Transition(
            cancel, tuple(CANCELLED if end is FAILED else end for end in ends)
        )
        rows[state, ev.PeerGone] = Transition(lose_peer, ends)
        rows[state, EngineLost] = Transition(lose_engine, ends)
        rows[state, Stopped] = Transition(stop, ends)
        rows[state, ev.StepFailed] = Transition(fail_step, ends)
        rows[state, DeadlinePassed] = Transition(check_time, (*stays, *ends))
    for state in (DRAINING, *ENDS):
        rows[state, ev.CancelRequested] = Transition(accept_late_cancel, (state,))
        rows[state, Claim] = Transition(release_late_lease, (state,))
        rows[state, Renew] = Transition(release_late_lease, (state,))
    rows.update(SPECIFIC)
    return rows


IGNORED_BY_DEFAULT: tuple[Kind, ...] = (
    Meet,
    Claim,
    Renew,
    Take,
    ev.PeerReady,
    ev.TurnCame,
    ev.StepFailed,
    ev.OfferAdvanced,
    ev.ChunkRead,
    ev.OthersEnded,
    ev.PeerGone,
    EngineLost,
    Stopped,
    DeadlinePassed,
)

AFTER_A_GRANT = (WAITING, READING, TAKING, DRAINING, FAILED)

SPECIFIC: Mapping[tuple[FetchState, Kind], Transition[FetchState]] = {
    (MEETING, Meet): Transition(take_ticket, (MEETING, RESOLVING, FAILED)),
    (RESOLVING, ev.PeerReady): Transition(queue, (QUEUED,)),
    (QUEUED, ev.TurnCame): Transition(start, (CLAIMING, READING, TAKING)),
    (CLAIMING, Claim): Transition(take_grant, (CLAIMING, *AFTER_A_GRANT)),
    (CLAIMING, ev.OfferAdvanced): Transition(claim_at_news, (CLAIMING,)),
    (WAITING, Renew): Transition(take_grant, AFTER_A_GRANT),
    (WAITING, ev.OfferAdvanced): Transition(ask_for_news, (WAITING,)),
    (READING, Claim): Transition(take_grant, (READING, DRAINING)),
    (READING, Renew): Transition(take_grant, (READING, DRAINING)),
    (READING, ev.OfferAdvanced): Transition(ask_for_news, (READING,)),
    (READING, ev.ChunkRead): Transition(
        end_chunk, (READING, CLAIMING, WAITING, TAKING, DRAINING, FAILED)
    ),
    (READING, ev.OthersEnded): Transition(end_others, (READING,)),
    (WAITING, ev.OthersEnded): Transition(end_others, (WAITING, TAKING)),
    (TAKING, Take): Transition(complete, (TAKING, COMPLETED, FAILED)),
    (TAKING, ev.OfferAdvanced): Transition(take_again_at_news, (TAKING,)),
    (DRAINING, Claim): Transition(keep_late_lease, (DRAINING,)),
    (DRAINING, Renew): Transition(keep_late_lease, (DRAINING,)),
    (DRAINING, ev.ChunkRead): Transition(finish_draining, (DRAINING, FAILED, CANCELLED)),
    (DRAINING, ev.OthersEnded): Transition(end_late_others, (DRAINING, FAILED, CANCELLED)),
    (DRAINING, EngineLost): Transition(abandon_others, (DRAINING, FAILED, CANCELLED)),
}

TRANSITIONS = _table()
