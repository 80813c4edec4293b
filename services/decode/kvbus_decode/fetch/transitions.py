"""Which event does what to a fetch in which state: the table, and its handlers.

An event that comes too late for its fetch changes nothing, but a lease that it brings is given
back. Every handler returns the commands for the agent, in order.

Blocks are never freed under a read: while a chunk is in flight the end is reported at once, and the
blocks when the read has ended (draining). A chunk is what the prefill agent said is ready, in a
grant or in the ticket (`Ahead`), and only a sealed offer is taken.

The prefill agent is asked one thing at a time, the one that the state waits for (`ask`). It is
asked again when there is news, or when its answer was early (``busy``). An answer may be as late as
the end of the fetch; only an agent that does not answer a claim is not there.
"""

import math
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError, RequestRefused
from kvbus.protocol.engine import BlocksFreed, Landed
from kvbus.protocol.message import Empty, Request
from kvbus.protocol.peer import (
    Claim,
    CommitAnswer,
    CommitQuery,
    Forgo,
    Granted,
    Meet,
    PeerWithdraw,
    Release,
    Renew,
    Take,
)
from kvbus.protocol.ticket import Ticket
from kvbus.table import transitions
from kvbus.table.events import DeadlinePassed, EngineLost, SendReply, Stopped
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import ENDS, LEASED, STAGES, Context, FetchEntry, FetchState

MEETING, RESOLVING, QUEUED = FetchState.MEETING, FetchState.RESOLVING, FetchState.QUEUED
CLAIMING, WAITING = FetchState.CLAIMING, FetchState.WAITING
READING, TAKING = FetchState.READING, FetchState.TAKING
RETRYING, DRAINING = FetchState.RETRYING, FetchState.DRAINING
COMPLETED, FAILED, CANCELLED = ENDS

Commands = list[ev.Command]

REASON_SHARE = 0.9
"""Of the time that is left, for the peer to be found: its name says more than a deadline does."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 2.0
EARLY = (ErrorCode.BUSY, ErrorCode.OFFER_OPEN)
"""What was asked too early: another reader has the lease, or the seal has not come."""
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
"""What may pass: the next attempt can succeed. Everything else fails the fetch at once."""
PASSING = RETRIED | {ErrorCode.CANCELLED}
"""With what the transfers of a failed attempt end, which were stopped."""
RETRY_S, MAX_RETRY_S = 0.05, 1.0
"""The second pause between attempts, and the longest; the first one is 0."""

READ_HINT = (
    ": not all bytes have come. If none ever do, see whether both hosts reach each other on what "
    "data_interfaces names, with packets of full size (MTU); kvbus doctor --peer looks"
)
"""Requests get through, by another way or as they are small."""


def ask(fetch: FetchEntry, at: Context) -> ev.Ask:
    """Ask what the state waits for: the ticket, the lease, more of it and news, or the yes.

    It answers all hints so far.
    """
    if fetch.state is MEETING:
        name = fetch.requested.ticket.secret  # the rendezvous says no more of the ticket
        message: Request[Any] = Meet(transfer_id=name, wait_s=max(0.0, fetch.deadline - at.now))
    elif fetch.repeated:
        message = _commit_query(fetch, at)
    elif fetch.state is TAKING or fetch.held is None:
        message = _claim_or_take(fetch, at)
    else:
        tables, ticket = {} if fetch.in_doubt else fetch.tables, fetch.requested.ticket
        message = Renew(
            agent_boot=fetch.boot,
            offer_id=ticket.offer_id,
            epoch=fetch.held.epoch,
            token=fetch.held.token,
            lease_s=at.limits.lease_s,
            known_blocks={group: len(table) for group, table in tables.items()},
            nixl_agent=fetch.home_nixl,
        )
    fetch.question, fetch.ask_at, fetch.hinted = message, None, False
    is_short = isinstance(message, Claim | CommitQuery)
    longest_s = at.limits.request_timeout_s if is_short else math.inf
    timeout_s = min(longest_s, max(1e-3, fetch.answer_until - at.now))
    return ev.Ask(fetch.requested, fetch.attempts, message, timeout_s)


def _commit_query(fetch: FetchEntry, at: Context) -> CommitQuery:
    requested, ticket = fetch.requested, fetch.requested.ticket
    named = {
        "offer_id": ticket.offer_id,
        "engine_id": ticket.engine_id,
        "engine_instance": ticket.engine_instance,
    }
    return CommitQuery(
        secret=ticket.secret,
        token=requested.take_token,
        reader_boot=at.limits.reader_boot,
        **(named if requested.has_met else {}),
    )


def _claim_or_take(fetch: FetchEntry, at: Context) -> Claim | Take:
    """By the ticket's secret.

    The take has the blocks compared where no lease of this process named them: only the ticket
    did, or it is repeated.
    """
    requested, ticket, limits = fetch.requested, fetch.requested.ticket, at.limits
    shown: dict[str, Any] = {
        "agent_boot": fetch.boot,
        "offer_id": ticket.offer_id,
        "reader_id": f"{limits.reader_boot}/{fetch.key}",
        "secret": ticket.secret,
        "reader_agent": limits.reader_agent,
        "reader_boot": limits.reader_boot,
        "part": bool(requested.access),
    }
    if fetch.state is not TAKING:
        return Claim(lease_s=limits.lease_s, **shown)
    if fetch.held is None or fetch.in_doubt:
        shown["tables"] = dict(fetch.tables)
        shown["num_tokens"], shown["engine_id"] = fetch.num_ready, ticket.engine_id
    return Take(token=requested.take_token, nixl_agent=fetch.nixl_agent, **shown)


def ask_later_or_fail(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """The prefill agent has refused, or cannot be asked.

    What was early is asked again: at once if there was news meanwhile, else after a pause, as news
    may get lost. After the deadline nothing is asked.
    """
    error = event.error or RemoteError("the reply is of another kind", code=ErrorCode.INVALID)
    is_leased = fetch.held is not None and not fetch.in_doubt
    if error.code not in EARLY or (fetch.is_undecided and is_leased):
        return retry_or_fail(fetch, error, at)
    fetch.question, fetch.ask_at = None, at.now + _pause_s(event, at)
    if fetch.deadline <= at.now:
        return fail(fetch, _overdue(fetch), at)
    return [ask(fetch, at)] if fetch.hinted else []


def _pause_s(event: ev.Answered, at: Context) -> float:
    """How long to wait before it is asked again: as the prefill agent says, or by our config.

    At least a millisecond and at most a few seconds, whatever an agent says; up to twice as long,
    by luck.
    """
    hint = event.error.detail.get("retry_after_s") if event.error is not None else None
    least_s = hint if isinstance(hint, int | float) else at.limits.busy_retry_s
    # In this order: a hint may be no number at all.
    return min(max(MIN_PAUSE_S, least_s), MAX_PAUSE_S) * (1 + event.luck)


def note_news(fetch: FetchEntry, _event: ev.OfferAdvanced, at: Context) -> Commands:
    """A hint: what is asked now tells what is true. During a question, ask once more after it.

    A read ahead of the lease needs none.
    """
    if fetch.repeated and fetch.others_read:  # parts of the earlier process end first
        return []
    if fetch.question is None and (fetch.held is not None or fetch.chunk is None):
        return [ask(fetch, at)]
    fetch.hinted = True
    return []


def check_time(fetch: FetchEntry, _event: DeadlinePassed, at: Context) -> Commands:
    """The fetch's deadline, the lease's end, the next question, or the end of its place."""
    if fetch.ends_at <= at.now:
        return fail(fetch, _overdue(fetch), at)
    if fetch.held is not None and fetch.state in LEASED and fetch.lease_ends_at <= at.now:
        message = "the lease ended before the read did"
        return retry_or_fail(fetch, RemoteError(message, code=ErrorCode.LEASE_EXPIRED), at)
    return [ask(fetch, at)] if fetch.ask_at is not None and fetch.ask_at <= at.now else []


def _overdue(fetch: FetchEntry) -> RemoteError:
    """A peer that was not found again says why: the error of the attempt before is the cause."""
    code = ErrorCode.TIMEOUT
    message = f"the fetch did not end within its deadline, it was {fetch.state}"
    if fetch.state is READING:
        message += READ_HINT
    if fetch.error is not None:
        message += f", after {fetch.attempts} attempts; the last: {fetch.error.message}"
        if fetch.state is RESOLVING:
            code = fetch.error.code
    return RemoteError(message, code=code)


def take_ticket(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """The offer was made: from here on it is a fetch like any other."""
    if not isinstance(event.outcome, Ticket):
        return ask_later_or_fail(fetch, event, at)
    fetch.question, fetch.requested = None, replace(fetch.requested, ticket=event.outcome)
    fetch.boot = event.outcome.agent_boot
    fetch.enter(RESOLVING, at.now)
    return [resolve(fetch, at)]


def resolve(fetch: FetchEntry, at: Context) -> ev.FindRoute:
    left_s = REASON_SHARE * (fetch.deadline - at.now)
    timeout_s = max(1e-3, min(at.limits.request_timeout_s, left_s))
    return ev.FindRoute(fetch.requested, fetch.attempts, fetch.deadline, timeout_s)


def queue(fetch: FetchEntry, event: ev.PeerReady, at: Context) -> Commands:
    """The peer is known: the claim waits for its turn, which may come at once.

    A commit says nothing of memory at other agents: where that is other memory, all is read again.
    So is what came from an earlier data process, unless the answer to a commit of it is missing.
    """
    is_other = event.elsewhere != fetch.elsewhere
    fetch.boot, fetch.elsewhere, fetch.home_nixl = event.boot, event.elsewhere, event.nixl_agent
    if is_other or (fetch.is_stale and not fetch.unconfirmed):
        fetch.read_again()
    fetch.enter(QUEUED, at.now)
    return []


def start(fetch: FetchEntry, _event: object, at: Context) -> Commands:
    """It may begin: ask for the lease; or read what the ticket names, with the claim beside it.

    That claim comes after a while, where most reads end before. An engine that has all tokens only
    takes the offer.
    """
    if fetch.unconfirmed:
        fetch.enter(TAKING, at.now)
        return [ask(fetch, at)]
    ahead = fetch.requested.ahead
    if ahead is None:
        fetch.enter(CLAIMING, at.now)
        return [ask(fetch, at)]
    fetch.in_doubt = fetch.sealed = True
    fetch.tables, fetch.num_ready = dict(ahead.tables), fetch.requested.ticket.num_tokens
    commands = go_on(fetch, at)
    if fetch.chunk is not None and ahead.claims:
        return [ask(fetch, at), *commands]
    if fetch.chunk is not None:
        fetch.ask_at = at.now + at.limits.claim_after_s
    return commands


def go_on(fetch: FetchEntry, at: Context) -> Commands:
    """No chunk is in flight: read what is ready, or take what was all, or wait for more.

    The parts of other agents are waited for, too. Read ahead of the lease: what became of the claim
    is waited for.
    """
    fetch.chunk = fetch.next_chunk()
    if fetch.chunk is not None:
        fetch.enter(READING, at.now)
        return [fetch.chunk]
    if not fetch.sealed or fetch.is_claiming or fetch.others_read:
        fetch.enter(CLAIMING if fetch.is_claiming else WAITING, at.now)
        return []
    fetch.enter(TAKING, at.now)
    return [ask(fetch, at)]


def take_grant(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """The lease, or more of it, and what the offer has by now; during a chunk that waits."""
    if not isinstance(event.outcome, Granted):
        return ask_later_or_fail(fetch, event, at)
    commands: Commands = []
    is_first = fetch.held is None
    try:
        fetch.hold(event.sent_at, event.outcome)
    except KVBusError as error:
        return fail(fetch, error, at)
    if is_first and fetch.requested.others:
        fetch.others_read = True
        commands.append(ev.AskOthers(fetch.requested, fetch.attempts))
    if fetch.chunk is None:
        commands += go_on(fetch, at)
    if fetch.hinted and not fetch.sealed:
        commands.append(ask(fetch, at))
    return commands


def end_read(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    """A chunk has landed, or the parts of all other agents: on to the next chunk, or to the take.

    The engine is told of tokens that are in the blocks of all ranks, if it wants to know.
    """
    fetch.land(event)
    if event.error is not None:
        return retry_or_fail(fetch, event.error, at)
    commands = [] if fetch.chunk is not None else go_on(fetch, at)
    asked = fetch.requested.asked
    if asked.chunk_tokens and fetch.num_read and not fetch.others_read:
        landed = Landed(fetch_id=asked.fetch_id, num_tokens=fetch.read_to)
        commands.append(ev.Notify(fetch.requested, landed))
    return commands


def complete(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """A yes says that the KV is valid: the only way to this state."""
    if event.error is not None:
        return ask_later_or_fail(fetch, event, at)
    fetch.error = None
    fetch.enter(COMPLETED, at.now)
    return [fetch.report(COMPLETED)]


# A fetch of a process that was lost: its link repeats it, with the token that the earlier process
# showed in its commit. The bytes of that process are in the blocks if it has sent a commit, as it
# did so after the last byte. So a commit that the prefill agent has granted completes the fetch:
#
#     process 1   READ ─▶ commit ─┬─┤ lost      yes, or the word: committed ─▶ completed
#     process 2                   │   query ─▶ ┤
#     prefill                     └▶ yes / no   no: all is read again, with this token
#
# A no holds: the prefill agent refuses a commit of process 1 that comes later, as it would free the
# blocks under the second read, and grant the second commit, which shows the same token.
def take_commit_answer(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    """The earlier process has completed the fetch, or it is one like any other."""
    if not isinstance(fetch.question, CommitQuery):  # it was not asked in this state
        return []
    if not isinstance(event.outcome, CommitAnswer):
        return ask_later_or_fail(fetch, event, at)
    fetch.question, fetch.ask_at, fetch.repeated = None, None, False
    if event.outcome.committed:
        fetch.note_committed(event.outcome)
        fetch.enter(COMPLETED, at.now)
        return [fetch.report(COMPLETED)]
    if fetch.requested.has_met and fetch.requested.has_route:
        fetch.enter(QUEUED, at.now)
        return []
    fetch.enter(RESOLVING if fetch.requested.has_met else MEETING, at.now)
    return [resolve(fetch, at) if fetch.requested.has_met else ask(fetch, at)]


def end_earlier_parts(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    """No other agent writes for an earlier process of this one: ask whether that has committed."""
    fetch.land(event)
    if event.error is not None:
        return fail(fetch, event.error, at)
    return [ask(fetch, at)] if fetch.repeated else []


# Why an attempt may be repeated, and what it keeps:
#
#     attempt 1   acquire ─▶ lease   READ ──┤ error ─▶ stop ──┤ last transfer has ended
#     attempt 2                                               └ pause ─▶ handshake ─▶ acquire ─▶ ...
#
# Nothing of an attempt is in flight when the next one starts, so no two attempts write to the
# blocks. The lease, the route and the answers of an attempt are its own: events carry its number.
# The tokens that it read stay. The commit at the end says that the offer was live and these were
# its blocks, so it was live when they were read, whichever lease was held then.
#
# A commit that got no answer may have ended the offer, which a handshake or a lease would then
# refuse. So the next attempt repeats the commit first, and shows the tables.
#
# A commit names the NIXL agent that was read from. If the prefill agent has replaced that data
# process, the bytes may be another one's, and the commit is refused, but not one that is repeated:
#
#     attempt 1   READ from A ─▶ commit "A" ─▶ yes, lost          READ from A ─▶ commit "A"
#     there                          A ends, B begins             A ends, B begins   └▶ stale
#     attempt 2                      commit "A" ─▶ yes            READ from B ─▶ commit "B" ─▶ yes
def retry_or_fail(fetch: FetchEntry, error: KVBusError, at: Context) -> Commands:
    """An attempt failed: stop it, and start another one unless this error or the time is final."""
    is_final = error.code not in RETRIED or fetch.deadline <= at.now
    if is_final or (fetch.state is MEETING and error.code is ErrorCode.ENGINE_NOT_READY):
        return fail(fetch, error, at)
    has_asked = fetch.state is TAKING and not fetch.repeated
    fetch.unconfirmed |= has_asked and not isinstance(error, RequestRefused)
    if has_asked and error.code is ErrorCode.STALE and fetch.is_stale:
        fetch.read_again()
    fetch.error, fetch.failed_in, fetch.ask_at = error.without_frames(), fetch.state, None
    fetch.enter(RETRYING, at.now)
    return [stop_reads(fetch)] if fetch.in_flight else _end_attempt(fetch, error, at)


def _end_attempt(fetch: FetchEntry, error: KVBusError, at: Context) -> Commands:
    """Nothing is in flight: give back what the attempt had, and pause.

    The fetch fails now when there is no time for another attempt.
    """
    pause_s = 0.0
    if fetch.attempts > 1:
        jitter = crc32(f"{fetch.key} {fetch.attempts}".encode()) / 2**32
        pause_s = min(RETRY_S * 2 ** min(fetch.attempts - 2, 8), MAX_RETRY_S) * (1 + jitter) / 2
    if at.now + pause_s >= fetch.deadline:
        return fail(fetch, error, at)
    commands = [] if fetch.unconfirmed else give_back(fetch)
    fetch.drop_attempt()
    fetch.ask_at = at.now + pause_s
    return [*commands, ev.EndAttempt(fetch.requested, fetch.attempts, error)]


def retry(fetch: FetchEntry, _event: DeadlinePassed, at: Context) -> Commands:
    """The pause is over: start the next attempt. Or the deadline has come."""
    if fetch.deadline <= at.now:
        return fail(fetch, _overdue(fetch), at)
    if fetch.ask_at is None or fetch.ask_at > at.now:
        return []
    fetch.attempts += 1
    fetch.ask_at = None
    commits = fetch.unconfirmed and not isinstance(fetch.error, RequestRefused)
    if fetch.repeated:
        fetch.enter(TAKING, at.now)
    elif fetch.requested.has_met and not (commits and not fetch.elsewhere):
        fetch.enter(RESOLVING, at.now)
        return [resolve(fetch, at)]
    else:
        fetch.enter(TAKING if commits else MEETING, at.now)
    return [ev.HoldPeer(fetch.requested, fetch.attempts, fetch.deadline), ask(fetch, at)]


def end_stopped_read(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    """A transfer of the failed attempt has ended; what it brought counts if it brought all."""
    fetch.land(event)
    if event.error is not None and event.error.code not in PASSING:
        return fail(fetch, event.error, at)
    if fetch.in_flight or fetch.error is None:
        return []
    return _end_attempt(fetch, fetch.error, at)


def keep_or_release_lease(fetch: FetchEntry, event: ev.Answered, at: Context) -> Commands:
    return (keep_late_lease if fetch.in_flight else release_late_lease)(fetch, event, at)


def fail_if_final(fetch: FetchEntry, event: ev.StepFailed, at: Context) -> Commands:
    """More of the failed attempt fails: what cannot pass ends the fetch."""
    return [] if event.error.code in PASSING else fail(fetch, event.error, at)


def fail(
    fetch: FetchEntry, error: KVBusError, at: Context, *, ends_as: FetchState = FAILED
) -> Commands:
    """Report the end now; while something is in flight the blocks come later, by draining."""
    stage, in_flight, is_stopped = fetch.state, fetch.in_flight, fetch.state is RETRYING
    is_answered = isinstance(error, RequestRefused) and stage is TAKING
    undecided = fetch.is_undecided and not is_answered
    fetch.error, fetch.ends_as = error.without_frames(), ends_as
    fetch.enter(DRAINING if in_flight else ends_as, at.now)
    ends = give_back(fetch) if not in_flight else [] if is_stopped else [stop_reads(fetch)]
    return [*ends, fetch.report(fetch.failed_in or stage if is_stopped else stage, undecided)]


def fail_for(
    fetch: FetchEntry, event: ev.StepFailed | EngineLost | Stopped, at: Context
) -> Commands:
    """The step that this state waits for did not work, or the engine or the agent is gone."""
    if isinstance(event, ev.StepFailed):
        return retry_or_fail(fetch, event.error, at)
    if isinstance(event, EngineLost):
        error: KVBusError = RemoteError("the decode engine is gone", code=ErrorCode.ENGINE_LOST)
    else:
        error = LocalError("the decode agent stops", code=ErrorCode.DRAINING)
    return fail(fetch, error, at)


def cancel(fetch: FetchEntry, event: ev.CancelRequested, at: Context) -> Commands:
    """The engine gave up: say yes, and end.

    One that has ended already says so in its answer; its offer may still wait for another reader. A
    completed one has ended its offer by its take.
    """
    commands: Commands = [SendReply(event.reply_to, Empty())] if event.reply_to is not None else []
    if fetch.state in STAGES:
        error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
        commands += fail(fetch, error, at, ends_as=CANCELLED)
    if not event.release_offer or fetch.state is COMPLETED:
        return commands
    ticket = fetch.requested.ticket
    message: Forgo | PeerWithdraw = Forgo(transfer_id=ticket.secret)
    if fetch.requested.has_met:
        offer = {"agent_boot": fetch.boot, "offer_id": ticket.offer_id}
        message = PeerWithdraw(**offer, secret=ticket.secret)
    return [*commands, ev.Tell(ticket, message)]


def free(fetch: FetchEntry, event: ev.ReadEnded, at: Context) -> Commands:
    """Once nothing is in flight the engine gets its blocks back, and the lease goes."""
    fetch.land(event)
    if fetch.in_flight:
        return []
    fetch.enter(fetch.ends_as, at.now)
    freed = BlocksFreed(fetch_id=fetch.requested.asked.fetch_id)
    return [*give_back(fetch), ev.Notify(fetch.requested, freed)]


def stop_reads(fetch: FetchEntry) -> ev.StopReads:
    return ev.StopReads(fetch.key, fetch.requested.resources)


def give_back(fetch: FetchEntry) -> Commands:
    if fetch.held is None or fetch.error is None:
        return []
    return [release(fetch.requested.ticket, fetch.boot, fetch.held, fetch.error.code)]


def release(ticket: Ticket, boot: str, lease: Granted, code: ErrorCode) -> ev.Tell:
    of = {"agent_boot": boot, "offer_id": ticket.offer_id}
    return ev.Tell(ticket, Release(**of, epoch=lease.epoch, token=lease.token, code=code.value))


def keep_late_lease(fetch: FetchEntry, event: ev.Answered, _: Context) -> Commands:
    """While it lives, the prefill agent drives the read that drains; it goes back after that."""
    if isinstance(event.outcome, Granted):
        fetch.receive(event.sent_at, event.outcome)
    return []


def release_late_lease(fetch: FetchEntry, event: ev.Answered, _: Context) -> Commands:
    """A claim was granted after its fetch had ended: do not let the offer wait for its expiry."""
    granted = event.outcome
    if not isinstance(granted, Granted):
        return []
    code = fetch.error.code if fetch.error else ErrorCode.CANCELLED
    return [release(event.ticket, fetch.boot, granted, code)]


def ignore(_fetch: FetchEntry, _event: object, _: Context) -> Commands:
    """Comes too late to matter, or is a hint that this state does not need."""
    return []


ENDED = (DRAINING, *ENDS)
ANSWERS = (Meet, Claim, Renew, Take, CommitQuery)
"""An answer is known by the class of its question."""
HAPPENINGS = (ev.PeerReady, ev.TurnCame, ev.OfferAdvanced, ev.ReadEnded)
LOSSES = (ev.StepFailed, EngineLost, Stopped)
BEFORE_READS = (MEETING, RESOLVING, QUEUED, CLAIMING)
AFTER_A_GRANT = (WAITING, READING, TAKING, RETRYING, DRAINING, FAILED)

TRANSITIONS = transitions(
    (tuple(FetchState), (*ANSWERS, *HAPPENINGS, *LOSSES, DeadlinePassed), ignore, ()),
    (BEFORE_READS, LOSSES, fail_for, (FAILED,)),
    (BEFORE_READS, (ev.StepFailed,), fail_for, (RETRYING, FAILED)),
    ((WAITING, TAKING), LOSSES, fail_for, (RETRYING, DRAINING, FAILED)),
    ((READING,), LOSSES, fail_for, (RETRYING, DRAINING)),
    ((RETRYING,), (EngineLost, Stopped), fail_for, (DRAINING, FAILED)),
    ((RETRYING,), (ev.StepFailed,), fail_if_final, (RETRYING, DRAINING, FAILED)),
    (BEFORE_READS, (ev.CancelRequested,), cancel, (CANCELLED,)),
    ((WAITING, TAKING, RETRYING), (ev.CancelRequested,), cancel, (DRAINING, CANCELLED)),
    ((READING,), (ev.CancelRequested,), cancel, (DRAINING,)),
    (ENDED, (ev.CancelRequested,), cancel, ()),
    ((MEETING,), (DeadlinePassed,), check_time, (MEETING, FAILED)),
    ((RESOLVING, QUEUED), (DeadlinePassed,), check_time, (FAILED,)),
    ((CLAIMING,), (DeadlinePassed,), check_time, (CLAIMING, RETRYING, FAILED)),
    ((WAITING,), (DeadlinePassed,), check_time, (WAITING, RETRYING, DRAINING, FAILED)),
    ((READING,), (DeadlinePassed,), check_time, (READING, RETRYING, DRAINING)),
    ((TAKING,), (DeadlinePassed,), check_time, (TAKING, DRAINING, FAILED)),
    (
        (TAKING,),
        (CommitQuery,),
        take_commit_answer,
        (TAKING, MEETING, RESOLVING, QUEUED, RETRYING, COMPLETED, FAILED),
    ),
    ((TAKING,), (ev.ReadEnded,), end_earlier_parts, (TAKING, FAILED)),
    (
        (RETRYING,),
        (DeadlinePassed,),
        retry,
        (RETRYING, MEETING, RESOLVING, TAKING, DRAINING, FAILED),
    ),
    ((RETRYING,), (ev.ReadEnded,), end_stopped_read, (RETRYING, DRAINING, FAILED)),
    ((RETRYING,), (Claim,), keep_or_release_lease, ()),
    ((MEETING,), (Meet,), take_ticket, (MEETING, RESOLVING, RETRYING, FAILED)),
    ((RESOLVING,), (ev.PeerReady,), queue, (QUEUED,)),
    ((QUEUED,), (ev.TurnCame,), start, (CLAIMING, READING, TAKING)),
    ((CLAIMING,), (Claim,), take_grant, (CLAIMING, *AFTER_A_GRANT)),
    ((WAITING,), (Renew,), take_grant, AFTER_A_GRANT),
    ((READING,), (Claim, Renew), take_grant, (READING, RETRYING, DRAINING)),
    ((CLAIMING, WAITING, READING, TAKING), (ev.OfferAdvanced,), note_news, ()),
    (
        (READING,),
        (ev.ReadEnded,),
        end_read,
        (READING, CLAIMING, WAITING, TAKING, RETRYING, DRAINING, FAILED),
    ),
    ((WAITING,), (ev.ReadEnded,), end_read, (WAITING, TAKING, RETRYING, FAILED)),
    ((TAKING,), (Take,), complete, (TAKING, RETRYING, COMPLETED, FAILED)),
    ((DRAINING,), (ev.ReadEnded,), free, (DRAINING, FAILED, CANCELLED)),
    ((DRAINING,), (Claim,), keep_late_lease, ()),
    (ENDS, (Claim,), release_late_lease, ()),
)
