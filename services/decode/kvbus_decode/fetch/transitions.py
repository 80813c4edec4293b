"""Transitions of a fetch: the handler of each event in each state.

Blocks are never freed under a read. A chunk covers only tokens that a grant or the ticket reported
as ready. Only a sealed offer is committed. A late event changes nothing, but its lease is released.
"""

import math
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError, RequestRefused
from kvbus.protocol.engine import BlocksFreed, Landed
from kvbus.protocol.message import Empty, Request
from kvbus.protocol.peer import (
    Acquire,
    AwaitOffer,
    Commit,
    CommitAnswer,
    CommitQuery,
    Decline,
    Granted,
    PeerWithdraw,
    Release,
    Renew,
)
from kvbus.protocol.ticket import Ticket
from kvbus.table.events import DeadlinePassed, EngineLost, SendReply, Stopped
from kvbus.table.table import transitions
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import ENDS, LEASED, STAGES, Context, FetchEntry, FetchState

AWAITING, RESOLVING, QUEUED = FetchState.AWAITING, FetchState.RESOLVING, FetchState.QUEUED
ACQUIRING, WAITING = FetchState.ACQUIRING, FetchState.WAITING
READING, COMMITTING = FetchState.READING, FetchState.COMMITTING
RETRYING, DRAINING = FetchState.RETRYING, FetchState.DRAINING
COMPLETED, FAILED, CANCELLED = ENDS

Commands = list[ev.Command]

REASON_SHARE = 0.9
"""Share of the remaining time for a handshake, whose error explains more than a timeout."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 2.0
EARLY = (ErrorCode.BUSY, ErrorCode.OFFER_OPEN)
RETRIED = frozenset(
    {
        ErrorCode.PEER_LOST,
        ErrorCode.PEER_UNREACHABLE,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.STALE,
        ErrorCode.LEASE_EXPIRED,
        ErrorCode.CLOSED,
        ErrorCode.DRAINING,
        ErrorCode.ENGINE_NOT_READY,
        ErrorCode.TIMEOUT,
        ErrorCode.BUSY,
    }
)
PASSING = RETRIED | {ErrorCode.CANCELLED, ErrorCode.OFFER_PARKED}
"""Errors with which stopped transfers may end."""
RETRY_S, MAX_RETRY_S = 0.05, 1.0
"""Second pause between attempts, and the longest; the first one is 0."""

READ_HINT = (
    ": not all bytes have come. If none ever do, see whether both hosts reach each other on what "
    "data_interfaces names, with packets of full size (MTU); kvbus doctor --peer checks it"
)


def send_request(fetch: FetchEntry, at: Context) -> ev.SendRequest:
    """Return the state's request, the only one in flight; its reply covers all hints."""
    if fetch.state is AWAITING:
        name = fetch.requested.ticket.secret  # all that the rendezvous names of the ticket
        message: Request[Any] = AwaitOffer(
            transfer_id=name, wait_s=max(0.0, fetch.deadline - at.now)
        )
    elif fetch.repeated:
        message = _commit_query(fetch, at)
    elif fetch.state is COMMITTING or fetch.held is None:
        message = _acquire_or_commit(fetch, at)
    else:
        tables, ticket = {} if fetch.is_speculative else fetch.tables, fetch.requested.ticket
        message = Renew(
            agent_boot=fetch.boot,
            offer_id=ticket.offer_id,
            epoch=fetch.held.epoch,
            token=fetch.held.token,
            lease_s=at.limits.lease_s,
            known_blocks={group: len(table) for group, table in tables.items()},
            nixl_agent=fetch.home_nixl,
        )
    fetch.request_sent, fetch.request_at, fetch.refresh_needed = message, None, False
    is_short = isinstance(message, Acquire | CommitQuery)
    longest_s = at.limits.request_timeout_s if is_short else math.inf
    timeout_s = min(longest_s, max(1e-3, fetch.answer_until - at.now))
    return ev.SendRequest(fetch.requested, fetch.attempts, message, timeout_s)


def _commit_query(fetch: FetchEntry, at: Context) -> CommitQuery:
    requested, ticket = fetch.requested, fetch.requested.source
    named = {
        "offer_id": ticket.offer_id,
        "engine_id": ticket.engine_id,
        "engine_instance": ticket.engine_instance,
    }
    return CommitQuery(
        secret=ticket.secret,
        token=requested.commit_token,
        reader_boot=at.limits.reader_boot,
        **(named if requested.has_ticket else {}),
    )


def _acquire_or_commit(fetch: FetchEntry, at: Context) -> Acquire | Commit:
    requested, ticket, limits = fetch.requested, fetch.requested.source, at.limits
    shown: dict[str, Any] = {
        "agent_boot": fetch.boot,
        "offer_id": ticket.offer_id,
        "reader_id": f"{limits.reader_boot}/{fetch.key}",
        "secret": ticket.secret,
        "reader_agent": limits.reader_agent,
        "reader_boot": limits.reader_boot,
        "part": bool(requested.rank_secret),
    }
    if fetch.state is not COMMITTING:
        return Acquire(lease_s=limits.lease_s, engine_id=ticket.engine_id, **shown)
    if fetch.held is None or fetch.is_speculative:
        shown["tables"] = dict(fetch.tables)
        shown["num_tokens"], shown["engine_id"] = fetch.num_ready, ticket.engine_id
    return Commit(token=requested.commit_token, nixl_agent=fetch.nixl_agent, **shown)


def retry_later_or_fail(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """Retry an early request after a change of the offer, or a pause: events can be lost."""
    error = event.error or RemoteError("the reply is of another kind", code=ErrorCode.INVALID)
    is_leased = fetch.held is not None and not fetch.is_speculative
    if error.code not in EARLY or (fetch.is_undecided and is_leased):
        return retry_or_fail(fetch, error, at)
    fetch.request_sent, fetch.request_at = None, at.now + _pause_s(event, at)
    if fetch.deadline <= at.now:
        return fail(fetch, _overdue(fetch), at)
    return [send_request(fetch, at)] if fetch.refresh_needed else []


def _pause_s(event: ev.Answered, at: Context) -> float:
    hint = event.error.detail.get("retry_after_s") if event.error is not None else None
    least_s = hint if isinstance(hint, int | float) else at.limits.busy_retry_s
    # The order matters: `max` returns its first argument for a hint of NaN.
    return min(max(MIN_PAUSE_S, least_s), MAX_PAUSE_S) * (1 + event.jitter)


def on_offer_changed(fetch: FetchEntry, _event: ev.OfferAdvanced, at: Context) -> Commands:
    if fetch.repeated and fetch.remote_parts_read:  # parts of the earlier process end first
        return []
    if fetch.request_sent is None and (fetch.held is not None or fetch.chunk is None):
        return [send_request(fetch, at)]
    fetch.refresh_needed = True
    return []


def check_time(fetch: FetchEntry, _event: DeadlinePassed, at: Context) -> Commands:
    if fetch.ends_at <= at.now:
        return fail(fetch, _overdue(fetch), at)
    if fetch.held is not None and fetch.state in LEASED and fetch.lease_ends_at <= at.now:
        message = "the lease ended before the read did"
        return retry_or_fail(fetch, RemoteError(message, code=ErrorCode.LEASE_EXPIRED), at)
    return (
        [send_request(fetch, at)]
        if fetch.request_at is not None and fetch.request_at <= at.now
        else []
    )


def _overdue(fetch: FetchEntry) -> RemoteError:
    code = ErrorCode.TIMEOUT
    message = f"the fetch did not end within its deadline, it was {fetch.state}"
    if fetch.state is READING:
        message += READ_HINT
    if fetch.error is not None:
        message += f", after {fetch.attempts} attempts; the last: {fetch.error.message}"
        stage = fetch.failed_in if fetch.state is RETRYING else fetch.state
        if stage is RESOLVING:
            code = fetch.error.code
    return RemoteError(message, code=code)


def apply_ticket(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    if not isinstance(event.outcome, Ticket):
        return retry_later_or_fail(fetch, event, at)
    fetch.request_sent, fetch.requested = None, replace(fetch.requested, ticket=event.outcome)
    fetch.boot = event.outcome.agent_boot
    fetch.enter(RESOLVING, at.now)
    return [resolve(fetch, at)]


def resolve(fetch: FetchEntry, at: Context) -> ev.FindRoute:
    left_s = REASON_SHARE * (fetch.deadline - at.now)
    timeout_s = max(1e-3, min(at.limits.request_timeout_s, left_s))
    return ev.FindRoute(fetch.requested, fetch.attempts, fetch.deadline, timeout_s)


def queue(fetch: FetchEntry, event: ev.PeerReady, at: Context) -> Commands:
    """Queue the fetch, and discard tokens that a `Commit` does not cover."""
    is_other = event.elsewhere != fetch.elsewhere
    fetch.boot, fetch.elsewhere, fetch.home_nixl = event.boot, event.elsewhere, event.nixl_agent
    if is_other or (fetch.is_stale and not fetch.unconfirmed):
        fetch.read_again()
    fetch.enter(QUEUED, at.now)
    return []


def start(fetch: FetchEntry, _event: object, at: Context) -> Commands:
    if fetch.unconfirmed:
        fetch.enter(COMMITTING, at.now)
        return [send_request(fetch, at)]
    speculative = fetch.requested.speculative
    if speculative is None:
        fetch.enter(ACQUIRING, at.now)
        return [send_request(fetch, at)]
    fetch.is_speculative = fetch.sealed = True
    fetch.tables, fetch.num_ready = dict(speculative.tables), fetch.requested.ticket.num_tokens
    commands = go_on(fetch, at)
    if fetch.chunk is not None and speculative.acquires:
        return [send_request(fetch, at), *commands]
    if fetch.chunk is not None:
        fetch.request_at = at.now + at.limits.acquire_after_s  # most reads end before
    return commands


def go_on(fetch: FetchEntry, at: Context) -> Commands:
    fetch.chunk = fetch.next_chunk()
    if fetch.chunk is not None:
        fetch.enter(READING, at.now)
        return [fetch.chunk]
    if not fetch.sealed or fetch.is_acquiring or fetch.remote_parts_read:
        fetch.enter(ACQUIRING if fetch.is_acquiring else WAITING, at.now)
        return []
    fetch.enter(COMMITTING, at.now)
    return [send_request(fetch, at)]


def apply_grant(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    if not isinstance(event.outcome, Granted):
        return retry_later_or_fail(fetch, event, at)
    commands: Commands = []
    is_first = fetch.held is None
    try:
        fetch.hold(event.sent_at, event.outcome)
    except KVBusError as error:
        return fail(fetch, error, at)
    if is_first and fetch.requested.remote_ranks:
        fetch.remote_parts_read = True
        commands.append(ev.RequestRemoteParts(fetch.requested, fetch.attempts))
    if fetch.chunk is None:
        commands += go_on(fetch, at)
    if fetch.refresh_needed and not fetch.sealed:
        commands.append(send_request(fetch, at))
    return commands


def end_read(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    fetch.land(event)
    if event.error is not None:
        return retry_or_fail(fetch, event.error, at)
    commands = [] if fetch.chunk is not None else go_on(fetch, at)
    request = fetch.requested.request
    if request.chunk_tokens and fetch.num_read and not fetch.remote_parts_read:
        landed = Landed(fetch_id=request.fetch_id, num_tokens=fetch.read_to)
        commands.append(ev.NotifyEngine(fetch.requested, landed))
    return commands


def complete(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """Complete the fetch; only a granted `Commit` proves the KV valid."""
    if event.error is not None:
        return retry_later_or_fail(fetch, event, at)
    fetch.error = None
    fetch.enter(COMPLETED, at.now)
    return [fetch.report(COMPLETED)]


# A fetch of a lost process: the engine's link repeats it with the token of the earlier process.
# The earlier process sent its `Commit` after the last byte, so that the bytes are in the blocks. A
# `Commit` that the prefill agent has granted therefore completes the fetch:
#
#     process 1   READ ─▶ Commit ─┬─┤ lost      committed, by reply or cell ─▶ completed
#     process 2                   │   query ─▶ ┤
#     prefill                     └▶ ok / no    not committed: read all again, with this token
#
# "Not committed" is final: the prefill agent refuses a later `Commit` of process 1, which would
# free the blocks under the second read. The second `Commit`, with the same token, would then be
# granted.
def apply_commit_answer(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    if not isinstance(fetch.request_sent, CommitQuery):  # reply to a request of an earlier state
        return []
    if not isinstance(event.outcome, CommitAnswer):
        return retry_later_or_fail(fetch, event, at)
    fetch.request_sent, fetch.request_at, fetch.repeated = None, None, False
    if event.outcome.committed:
        fetch.note_committed(event.outcome)
        fetch.enter(COMPLETED, at.now)
        return [fetch.report(COMPLETED)]
    if fetch.requested.has_ticket and fetch.requested.has_route:
        fetch.enter(QUEUED, at.now)
        return []
    fetch.enter(RESOLVING if fetch.requested.has_ticket else AWAITING, at.now)
    return [resolve(fetch, at) if fetch.requested.has_ticket else send_request(fetch, at)]


def end_earlier_parts(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    fetch.land(event)
    if event.error is not None:
        return fail(fetch, event.error, at)
    return [send_request(fetch, at)] if fetch.repeated else []


# Why an attempt may be repeated, and what it keeps:
#
#     attempt 1   Acquire ─▶ lease   READ ──┤ error ─▶ stop ──┤ last transfer has ended
#     attempt 2                                               └ pause ─▶ handshake ─▶ Acquire ─▶ ...
#
# Nothing of an attempt is in flight when the next one starts, so no two attempts write to the
# blocks. Lease, route and replies belong to one attempt: events carry its number. The tokens that
# it has read stay. The final `Commit` confirms that the offer is live with these blocks. So it was
# live during all reads, under any lease.
#
# A `Commit` without a reply may have ended the offer, and a handshake or lease would then be
# refused. So the next attempt first repeats the `Commit`, and shows the tables.
#
# A `Commit` names the NIXL agent that was read from. If the prefill agent has replaced that data
# process, the bytes may come from its successor. It then refuses a new `Commit`, but grants a
# repeated one:
#
#     attempt 1   READ from A ─▶ Commit "A" ─▶ ok, reply lost     READ from A ─▶ Commit "A"
#     there                        A ends, B begins               A ends, B begins  └▶ stale
#     attempt 2                    Commit "A" ─▶ ok               READ from B ─▶ Commit "B" ─▶ ok
#
# If the offer was parked, the next attempt reads it from the pool, all of it: the engine may have
# written to its blocks since. This is no failure, so there is no pause:
#
#     attempt 1   READ from the engine ─▶ Acquire or Commit ─▶ offer_parked: the pool
#     attempt 2                                                └ handshake ─▶ Acquire ─▶ READ ─▶ ...
def retry_or_fail(fetch: FetchEntry, error: KVBusError, at: Context) -> Commands:
    is_retried = error.code in RETRIED or fetch.move_to(ev.PoolName.of(error))
    is_final = not is_retried or fetch.deadline <= at.now
    if is_final or (fetch.state is AWAITING and error.code is ErrorCode.ENGINE_NOT_READY):
        return fail(fetch, error, at)
    has_sent_commit = fetch.state is COMMITTING and not fetch.repeated
    fetch.unconfirmed |= has_sent_commit and not isinstance(error, RequestRefused)
    if has_sent_commit and error.code is ErrorCode.STALE and fetch.is_stale:
        fetch.read_again()
    fetch.error, fetch.failed_in, fetch.request_at = error.without_frames(), fetch.state, None
    fetch.enter(RETRYING, at.now)
    return [stop_reads(fetch)] if fetch.in_flight else _end_attempt(fetch, error, at)


def _end_attempt(fetch: FetchEntry, error: KVBusError, at: Context) -> Commands:
    pause_s, has_moved = 0.0, error.code is ErrorCode.OFFER_PARKED
    if fetch.num_failed > 1 and not has_moved:
        # A table has no random numbers; the hash differs by fetch and attempt.
        jitter = crc32(f"{fetch.key} {fetch.attempts}".encode()) / 2**32
        pause_s = min(RETRY_S * 2 ** min(fetch.num_failed - 2, 8), MAX_RETRY_S) * (1 + jitter) / 2
    if at.now + pause_s >= fetch.deadline:
        return fail(fetch, error, at)
    commands = [] if fetch.unconfirmed else release_lease(fetch)
    fetch.end_attempt()
    fetch.request_at = at.now + pause_s
    if has_moved:
        fetch.error = None
    return [*commands, ev.EndAttempt(fetch.requested, fetch.attempts, error)]


def retry(fetch: FetchEntry, _event: DeadlinePassed, at: Context) -> Commands:
    if fetch.deadline <= at.now:
        return fail(fetch, _overdue(fetch), at)
    if fetch.request_at is None or fetch.request_at > at.now:
        return []
    fetch.attempts += 1
    fetch.request_at = None
    repeats_commit = fetch.unconfirmed and not isinstance(fetch.error, RequestRefused)
    if fetch.repeated:
        fetch.enter(COMMITTING, at.now)
    elif fetch.requested.has_ticket and (fetch.elsewhere or not repeats_commit):
        fetch.enter(RESOLVING, at.now)
        return [resolve(fetch, at)]
    else:
        fetch.enter(COMMITTING if repeats_commit else AWAITING, at.now)
    return [
        ev.AcquirePeer(fetch.requested, fetch.attempts, fetch.deadline),
        send_request(fetch, at),
    ]


def end_stopped_read(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    fetch.land(event)
    if event.error is not None and event.error.code not in PASSING:
        return fail(fetch, event.error, at)
    if fetch.in_flight or fetch.error is None:
        return []
    return _end_attempt(fetch, fetch.error, at)


def keep_or_release_lease(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    return (keep_late_lease if fetch.in_flight else release_late_lease)(fetch, event, at)


def fail_if_final(fetch: FetchEntry, event: ev.StepFailed, at: Context) -> Commands:
    return [] if event.error.code in PASSING else fail(fetch, event.error, at)


def fail(
    fetch: FetchEntry, error: KVBusError, at: Context, *, ends_as: FetchState = FAILED
) -> Commands:
    stage, in_flight, is_stopped = fetch.state, fetch.in_flight, fetch.state is RETRYING
    is_answered = isinstance(error, RequestRefused) and stage is COMMITTING
    undecided = fetch.is_undecided and not is_answered
    fetch.error, fetch.ends_as = error.without_frames(), ends_as
    fetch.enter(DRAINING if in_flight else ends_as, at.now)
    ends = release_lease(fetch) if not in_flight else [] if is_stopped else [stop_reads(fetch)]
    return [*ends, fetch.report(fetch.failed_in or stage if is_stopped else stage, undecided)]


def fail_for(
    fetch: FetchEntry, event: ev.StepFailed | EngineLost | Stopped, at: Context
) -> Commands:
    if isinstance(event, ev.StepFailed):
        return retry_or_fail(fetch, event.error, at)
    if isinstance(event, EngineLost):
        error: KVBusError = RemoteError("the decode engine is gone", code=ErrorCode.ENGINE_LOST)
    else:
        error = LocalError("the decode agent stops", code=ErrorCode.DRAINING)
    return fail(fetch, error, at)


def cancel(fetch: FetchEntry, event: ev.CancelRequested, at: Context) -> Commands:
    """Cancel the fetch; one that has ended still releases its offer."""
    commands: Commands = [SendReply(event.reply_to, Empty())] if event.reply_to is not None else []
    if fetch.state in STAGES:
        error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
        commands += fail(fetch, error, at, ends_as=CANCELLED)
    if not event.release_offer or fetch.state is COMPLETED:
        return commands
    ticket = fetch.requested.ticket
    message: Decline | PeerWithdraw = Decline(transfer_id=ticket.secret)
    if fetch.requested.has_ticket:
        offer = {"agent_boot": fetch.boot, "offer_id": ticket.offer_id}
        message = PeerWithdraw(**offer, secret=ticket.secret)
    return [*commands, ev.NotifyAgent(ticket, message)]


def free(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    fetch.land(event)
    if fetch.in_flight:
        return []
    fetch.enter(fetch.ends_as, at.now)
    freed = BlocksFreed(fetch_id=fetch.requested.request.fetch_id)
    return [*release_lease(fetch), ev.NotifyEngine(fetch.requested, freed)]


def stop_reads(fetch: FetchEntry) -> ev.StopReads:
    return ev.StopReads(fetch.key, fetch.requested.resources)


def release_lease(fetch: FetchEntry) -> Commands:
    if fetch.held is None or fetch.error is None:
        return []
    return [release(fetch.requested.ticket, fetch.boot, fetch.held, fetch.error.code)]


def release(ticket: Ticket, boot: str, lease: Granted, code: ErrorCode) -> ev.NotifyAgent:
    of = {"agent_boot": boot, "offer_id": ticket.offer_id}
    return ev.NotifyAgent(
        ticket, Release(**of, epoch=lease.epoch, token=lease.token, code=code.value)
    )


def keep_late_lease(fetch: FetchEntry, event: ev.Answered, _: Context) -> Commands:
    """Keep a lease during draining, so that the prefill agent drives the READs."""
    if isinstance(event.outcome, Granted):
        fetch.receive(event.sent_at, event.outcome)
    return []


def release_late_lease(fetch: FetchEntry, event: ev.Answered, _: Context) -> Commands:
    granted = event.outcome
    if not isinstance(granted, Granted):
        return []
    code = fetch.error.code if fetch.error else ErrorCode.CANCELLED
    return [release(event.ticket, fetch.boot, granted, code)]


def ignore(_fetch: FetchEntry, _event: object, _: Context) -> Commands:
    return []


ENDED = (DRAINING, *ENDS)
ANSWERS = (AwaitOffer, Acquire, Renew, Commit, CommitQuery)
"""`Answered` events, by the class of the request."""
HAPPENINGS = (ev.PeerReady, ev.TurnCame, ev.OfferAdvanced, ev.ReadEnded)
LOSSES = (ev.StepFailed, EngineLost, Stopped)
BEFORE_READS = (AWAITING, RESOLVING, QUEUED, ACQUIRING)
AFTER_A_GRANT = (WAITING, READING, COMMITTING, RETRYING, DRAINING, FAILED)

TRANSITIONS = transitions(
    (tuple(FetchState), (*ANSWERS, *HAPPENINGS, *LOSSES, DeadlinePassed), ignore, ()),
    (BEFORE_READS, LOSSES, fail_for, (FAILED,)),
    (BEFORE_READS, (ev.StepFailed,), fail_for, (RETRYING, FAILED)),
    ((WAITING, COMMITTING), LOSSES, fail_for, (RETRYING, DRAINING, FAILED)),
    ((READING,), LOSSES, fail_for, (RETRYING, DRAINING)),
    ((RETRYING,), (EngineLost, Stopped), fail_for, (DRAINING, FAILED)),
    ((RETRYING,), (ev.StepFailed,), fail_if_final, (RETRYING, DRAINING, FAILED)),
    (BEFORE_READS, (ev.CancelRequested,), cancel, (CANCELLED,)),
    ((WAITING, COMMITTING, RETRYING), (ev.CancelRequested,), cancel, (DRAINING, CANCELLED)),
    ((READING,), (ev.CancelRequested,), cancel, (DRAINING,)),
    (ENDED, (ev.CancelRequested,), cancel, ()),
    ((AWAITING,), (DeadlinePassed,), check_time, (AWAITING, FAILED)),
    ((RESOLVING, QUEUED), (DeadlinePassed,), check_time, (FAILED,)),
    ((ACQUIRING,), (DeadlinePassed,), check_time, (ACQUIRING, RETRYING, FAILED)),
    ((WAITING,), (DeadlinePassed,), check_time, (WAITING, RETRYING, DRAINING, FAILED)),
    ((READING,), (DeadlinePassed,), check_time, (READING, RETRYING, DRAINING)),
    ((COMMITTING,), (DeadlinePassed,), check_time, (COMMITTING, DRAINING, FAILED)),
    (
        (COMMITTING,),
        (CommitQuery,),
        apply_commit_answer,
        (COMMITTING, AWAITING, RESOLVING, QUEUED, RETRYING, COMPLETED, FAILED),
    ),
    ((COMMITTING,), (ev.ReadEnded,), end_earlier_parts, (COMMITTING, FAILED)),
    (
        (RETRYING,),
        (DeadlinePassed,),
        retry,
        (RETRYING, AWAITING, RESOLVING, COMMITTING, DRAINING, FAILED),
    ),
    ((RETRYING,), (ev.ReadEnded,), end_stopped_read, (RETRYING, DRAINING, FAILED)),
    ((RETRYING,), (Acquire,), keep_or_release_lease, ()),
    ((AWAITING,), (AwaitOffer,), apply_ticket, (AWAITING, RESOLVING, RETRYING, FAILED)),
    ((RESOLVING,), (ev.PeerReady,), queue, (QUEUED,)),
    ((QUEUED,), (ev.TurnCame,), start, (ACQUIRING, READING, COMMITTING)),
    ((ACQUIRING,), (Acquire,), apply_grant, (ACQUIRING, *AFTER_A_GRANT)),
    ((WAITING,), (Renew,), apply_grant, AFTER_A_GRANT),
    ((READING,), (Acquire, Renew), apply_grant, (READING, RETRYING, DRAINING)),
    ((ACQUIRING, WAITING, READING, COMMITTING), (ev.OfferAdvanced,), on_offer_changed, ()),
    (
        (READING,),
        (ev.ReadEnded,),
        end_read,
        (READING, ACQUIRING, WAITING, COMMITTING, RETRYING, DRAINING, FAILED),
    ),
    ((WAITING,), (ev.ReadEnded,), end_read, (WAITING, COMMITTING, RETRYING, FAILED)),
    ((COMMITTING,), (Commit,), complete, (COMMITTING, RETRYING, COMPLETED, FAILED)),
    ((DRAINING,), (ev.ReadEnded,), free, (DRAINING, FAILED, CANCELLED)),
    ((DRAINING,), (Acquire,), keep_late_lease, ()),
    (ENDS, (Acquire,), release_late_lease, ()),
)
