"""The fetch table: what it asks for, what it reads, and what it reports to the engine, and when.

Each case is a script: events, with the time when it passes, and the commands; see `said`.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus import protocol
from kvbus.errors import ErrorCode, RemoteError, RequestRefused
from kvbus.geometry import BlockTable
from kvbus.protocol import Acquire, AwaitOffer, BlocksFreed, Commit, Release, Renew, Request
from kvbus.table.events import DeadlinePassed, DrainStarted, EngineLost, Refuse, SendReply, Stopped
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchLimits, FetchState
from kvbus_decode.fetch.events import SpeculativeRead
from kvbus_decode.fetch.table import FetchTable
from tests.support.examples import num_examples

LIMITS = FetchLimits(max_fetches=2, request_timeout_s=5.0, busy_retry_s=0.25)
PLACE = FetchLimits(num_places=1, place_timeout_s=1.0)
TICKET = protocol.Ticket(
    "p", "boot", "tcp://p", "engine-p", "engine-boot", "o1", "r1", 32, "secret"
)
RENDEZVOUS = protocol.Rendezvous("transfer-id-of-32-characters-here", "tcp://p:1", request_id="r1")
BUSY, TIMEOUT, STALE = ErrorCode.BUSY, ErrorCode.TIMEOUT, ErrorCode.STALE
EXPIRED, LEASE_EXPIRED = ErrorCode.OFFER_EXPIRED, ErrorCode.LEASE_EXPIRED
PEER_LOST, NOT_READY = ErrorCode.PEER_LOST, ErrorCode.ENGINE_NOT_READY


def requested(fetch_id: str = "f1", *, boot: str = "boot", **changes: Any) -> ev.Requested:
    """Fetch the 32 tokens of an offer; its agent has to be found."""
    more = {
        name: changes.pop(name) for name in {*changes} & {*protocol.StartFetch.__struct_fields__}
    }
    ticket = more.pop("ticket", replace(TICKET, agent_boot=boot))
    timeout_s = more.pop("timeout_s", 60.0)
    fields = {"fetch_id": fetch_id, "ticket": {}, "num_tokens": 32, "tables": {}, **more}
    asked = protocol.StartFetch(**fields)
    return ev.Requested(fetch_id, "engine-d", asked, ticket, timeout_s, "fetch", **changes)


def known(fetch_id: str = "f1", **changes: Any) -> ev.Requested:
    return requested(fetch_id, has_route=True, **changes)


def awaiting(**changes: Any) -> ev.Requested:
    return requested(ticket=RENDEZVOUS.unknown_ticket(), rendezvous=RENDEZVOUS, **changes)


def blocks(num_tokens: int, after: int = 0) -> dict[str, BlockTable]:
    ids = range(100 + after // 8, 100 + num_tokens // 8)
    return {"full": BlockTable.of(ids, first_block=after // 8)}


OF: dict[str, Any] = {"agent_boot": "boot", "offer_id": "o1"}
ACQUIRE = Acquire(**OF, reader_id="/f1", lease_s=9.0, secret="secret")
RENEW = Renew(**OF, epoch=1, lease_s=9.0, token="token")
COMMIT = Commit(**OF, reader_id="/f1", secret="secret", token="own")
AWAIT = AwaitOffer(transfer_id=RENDEZVOUS.transfer_id, wait_s=1.0)
QUERY = protocol.CommitQuery(secret="secret", token="own", reader_boot="next", offer_id="o1")


def answered(
    message: Request[Any], outcome: Any, *, fetch_id: str = "f1", attempt: int = 1, **more: float
) -> ev.Answered:
    return ev.Answered(fetch_id, attempt, message, outcome, TICKET, **more)


def step_failed(code: ErrorCode, attempt: int = 1) -> ev.StepFailed:
    return ev.StepFailed("f1", attempt, RemoteError("no", code=code))


def ready(
    fetch_id: str = "f1",
    *,
    boot: str = "boot",
    attempt: int = 1,
    elsewhere: tuple[str, ...] = (),
    nixl: str = "",
) -> ev.PeerReady:
    return ev.PeerReady(fetch_id, attempt, boot, elsewhere, nixl)


def grant(
    num_tokens: int = 32,
    *,
    sealed: bool | None = None,
    after: int = 0,
    epoch: int = 1,
    at: float = 0.0,
    **more: Any,
) -> ev.Answered:
    """The answer to an acquire, or to a renewal that has the blocks of ``after`` tokens."""
    is_sealed = num_tokens == 32 if sealed is None else sealed
    table = blocks(num_tokens, after)
    granted = protocol.Granted(epoch, 9.0, num_tokens, is_sealed, table, "token")
    return answered(ACQUIRE, granted, sent_at=at, **more)


def yes(attempt: int = 1) -> ev.Answered:
    return answered(COMMIT, protocol.Empty(), attempt=attempt)


def failed(code: ErrorCode, jitter: float = 0.0, **more: Any) -> ev.Answered:
    """The error to what the fetch has asked last."""
    return answered(ACQUIRE, RemoteError("it did not work", code=code, **more), jitter=jitter)


def refused(code: ErrorCode, attempt: int = 1) -> ev.Answered:
    return answered(ACQUIRE, RequestRefused("it did not work", code=code), attempt=attempt)


def parked(attempt: int = 1) -> ev.Answered:
    """A refusal, as the offer is in a pool."""
    pool = {"engine_id": "pool", "engine_instance": "pool-boot"}
    error = RequestRefused("it is parked", code=ErrorCode.OFFER_PARKED, **pool)
    return answered(ACQUIRE, error, attempt=attempt)


def parked_at_handshake() -> ev.StepFailed:
    error = parked().error
    assert error is not None
    return ev.StepFailed("f1", 1, error)


def renew_failed(code: ErrorCode) -> ev.Answered:
    return answered(RENEW, RemoteError("it did not work", code=code))


def read(num_bytes: int = 4096, path: str = "direct", fetch_id: str = "f1") -> ev.ReadEnded:
    return ev.ReadEnded(fetch_id, num_bytes, None, path)


def read_from(nixl: str) -> ev.ReadEnded:
    return replace(READ, nixl_agent=nixl)


State = FetchState
LAST_ASKED: dict[State, Request[Any]] = {State.AWAITING: AWAIT, State.COMMITTING: COMMIT}
READY, READ, HINT, DUE = ready(), read(), ev.OfferAdvanced("f1"), DeadlinePassed()
YES, MET = yes(), answered(AWAIT, TICKET)
CANCEL = ev.CancelRequested("f1", "cancel")
GIVE_UP = replace(CANCEL, release_offer=True)
NO_PART, GONE = step_failed(ErrorCode.ENGINE_LOST), step_failed(PEER_LOST)
LOST, STOPPED = EngineLost("engine-d"), Stopped()
NOT_READ = ev.ReadEnded("f1", 0, RemoteError("no", code=ErrorCode.TRANSFER_FAILED))
OTHERS = (protocol.AgentRanks("tcp://other:1", (1,), "access-of-16-chars"),)
READING: list[Any] = [requested(), READY, grant()]
WAITING: list[Any] = [requested(), READY, grant(0)]
ASKED: list[Any] = [*READING, READ]
SPREAD: list[Any] = [requested(remote_ranks=OTHERS), READY, grant()]
WAITS: list[Any] = [*SPREAD, READ]
OTHERS_DONE = replace(READ, elsewhere=True)
AGAIN, SPREAD_AGAIN = requested(repeated=1), requested(repeated=1, remote_ranks=OTHERS)
COMMITTED, DENIED = (answered(QUERY, protocol.CommitAnswer(is_so, 32)) for is_so in (True, False))
# fmt: off
WORDS = {
    SendReply: "ok", ev.StopReads: "stop", ev.RequestRemoteParts: "ask others",
    ev.EndAttempt: "end",
    ev.AcquirePeer: "hold", ev.FindRoute: "resolve", ev.EndEarlierParts: "end parts",
    BlocksFreed: "freed", protocol.Landed: "landed", AwaitOffer: "await_offer", Acquire: "acquire",
    Renew: "renew", protocol.CommitQuery: "query", Commit: "commit", Release: "release",
    protocol.Decline: "decline", protocol.PeerWithdraw: "withdraw",
}
# fmt: on


def said(commands: list[ev.Command]) -> list[str]:
    """One word for each command; of other fetches than f1 with their name."""
    words = []
    for one in commands:
        name = getattr(getattr(one, "requested", one), "fetch_id", "f1")
        words.append(_word(one) + f" {name}" * (name != "f1"))
    return words


def _word(command: ev.Command) -> str:  # noqa: PLR0911
    match command:
        case Refuse():
            return str(command.error.code)
        case ev.ReadChunk():
            return f"read {command.start}-{command.stop}" + command.last * " last"
        case ev.ReportFetched():
            return _end(command)
        case ev.SendRequest(message=message) | ev.NotifyAgent(message=message):
            word = WORDS[type(message)]
            if isinstance(message, Acquire | Commit | Renew) and message.agent_boot != "boot":
                word += f" {message.agent_boot}"
            if isinstance(message, Commit):
                word += " with blocks" * (message.tables is not None)
                word += f" of {message.nixl_agent}" * bool(message.nixl_agent)
            return word
        case ev.NotifyEngine(message=protocol.Landed(num_tokens=num_tokens)):
            return f"landed {num_tokens}"
        case ev.NotifyEngine():
            return "freed"
    return WORDS[type(command)]


def _end(report: ev.ReportFetched) -> str:
    """``drains`` when the blocks are not free, ``?`` when the offer may be completed."""
    fetched = report.fetched
    how = f" {fetched.stage} {fetched.code}" if fetched.code else ""
    is_open = " drains" * (not fetched.blocks_free) + " ?" * report.undecided
    return fetched.outcome.value + how + is_open + f" #{fetched.attempts}" * (fetched.attempts > 1)


def tell(table: FetchTable, event: ev.Event, now: float) -> list[ev.Command]:
    """Handle an event; an answer to `ACQUIRE` is the one to what its fetch has asked last."""
    known = table.live.get(event.fetch_id) if isinstance(event, ev.Answered) else None
    if known is None or not isinstance(event, ev.Answered) or event.message is not ACQUIRE:
        return table.handle(event, now)
    if event.error is not None and known.state in LAST_ASKED:
        event = replace(event, message=LAST_ASKED[known.state])
    elif event.error is not None and known.state in (State.RESOLVING, State.QUEUED):
        return table.handle(ev.StepFailed(event.fetch_id, event.attempt, event.error), now)
    elif known.held is not None:
        event = replace(event, message=RENEW)
    return table.handle(event, now)


Scene = tuple[ev.Event, str] | tuple[float, ev.Event] | tuple[float, ev.Event, str]
Step = ev.Event | Scene | FetchLimits


def play(*steps: Step) -> FetchTable:
    """Handle each event; it comes when the one before did, unless it has a time."""
    table, now = FetchTable(LIMITS), 0.0
    for step in steps:
        if isinstance(step, FetchLimits):
            table = FetchTable(step)
            continue
        parts: list[Any] = [*step] if isinstance(step, tuple) else [step]
        now = parts.pop(0) if isinstance(parts[0], int | float) else now
        event, *expected = parts
        words = ", ".join(said(tell(table, event, now)))
        assert expected in ([], [words]), (now, event)
    return table


def commands_of(kind: type[Any], *steps: Any, last: ev.Event, now: float = 0.0) -> Any:
    """The one command of that kind that the last event brings."""
    table = play(*steps)
    commands = tell(table, last, now)
    (found,) = (one for one in commands if kind in (type(one), type(getattr(one, "message", None))))
    return found


TABLES = blocks(32)
WITHOUT_LEASE, BOTH = (SpeculativeRead(TABLES, acquires=acquires) for acquires in (False, True))
ALONE, BESIDE = known(speculative=WITHOUT_LEASE), known(speculative=BOTH)
STATE = requested(has_state=True)
LATE = renew_failed(TIMEOUT), renew_failed(STALE), grant(32, after=32), grant(32, after=8)
NEWS: dict[str, dict[str, Any]] = {
    "fewer tokens": {"num_tokens": 8, "after": 8},
    "a seal of too few": {"num_tokens": 16, "after": 16, "sealed": True},
    "another epoch": {"num_tokens": 24, "after": 16, "epoch": 2},
}
# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    # from the request to the yes
    "a fetch resolves, acquires, reads, commits and has completed": [(requested(), "resolve"),
        (READY, "acquire"), (grant(), "read 0-32 last"), (READ, "commit"), (YES, "completed")],
    "the ticket is asked for until the deadline": [awaiting(timeout_s=1.0), (failed(BUSY), ""),
        (0.25, DUE, "await_offer"), (0.9, failed(BUSY), ""), (1, DUE, "failed awaiting timeout")],
    "a cancel before the offer is made declines it, also later": [awaiting(),
        (GIVE_UP, "ok, cancelled awaiting cancelled, decline"), (GIVE_UP, "ok, decline")],
    "a commit that is refused fails the fetch though all bytes have landed": [*ASKED,
        (0, failed(EXPIRED), "release, failed committing offer_expired ?")],
    "a lease that is granted after the end is given back": [requested(), READY, CANCEL,
        (grant(epoch=4), "release")],
    "an offer that is sealed with too few tokens fails the fetch": [requested(), READY,
        (grant(16, sealed=True), "release, failed acquiring invalid")],
    "a cancel is answered after the end, and unknown of what never was": [requested(), CANCEL,
        (CANCEL, "ok"), (ev.CancelRequested("never", "c"), "fetch_unknown")],
    "a fetch that drains keeps its place until its transfers end": [*READING, CANCEL,
        requested("f2"), (0, requested("f3"), "busy"), READ, (requested("f3"), "resolve f3")],
    "a fetch is not committed twice, nor after its end": [requested(),
        (requested(), "fetch_exists"), CANCEL, (requested(), "fetch_exists")],
    "an agent that drains commits no fetch": [DrainStarted(), (requested(), "draining")],
    # renewals, and news of the offer
    "a renewal that found its agent busy is sent again while the lease lasts": [*READING, HINT,
        (1, renew_failed(BUSY), ""), (1.2, DUE, ""), (1.3, DUE, "renew"), (8.9, renew_failed(BUSY)),
        (9, DUE, "stop")],
    "a lease that runs out stops the read without waiting for its renewal": [*READING,
        (3, DUE, "renew"), (9, DUE, "stop"), (9.5, DUE, ""), (10, READ, "release, end"),
        (DUE, "resolve")],
    "a hint that overtakes the acquire's answer makes it ask once more": [requested(), READY,
        (HINT, ""), (grant(0), "renew")],
    "hints during a renewal ask once more after it and not more often": [requested(), READY,
        grant(8), (HINT, "renew"), (HINT, ""), (HINT, ""), (grant(16, after=8), "renew"),
        (grant(24, after=16), "")],
    "a busy offer is acquired again at once when there is news of it": [requested(), READY,
        (failed(BUSY), ""), (HINT, "acquire")],
    "news that come while an acquire is under way are newer than its refusal": [requested(), READY,
        (HINT, ""), (failed(BUSY), "acquire"), (failed(BUSY), ""), (0.25, DUE, "acquire")],
    "a busy offer is acquired again after a moment until the deadline": [requested(timeout_s=1.0),
        READY, failed(BUSY), (0.25, DUE, "acquire"), (0.9, failed(BUSY), ""),
        (1, DUE, "failed acquiring timeout")],
    "blocks in the grant that leave a gap fail the fetch and give the lease back": [*WAITING, HINT,
        (0, grant(32, after=16), "release, failed waiting geometry")],
    # the last question
    "without an answer a fetch fails when its grace is over and a yes after it is nothing": [
        requested(timeout_s=1.0), READY, grant(), READ,
        (2, DUE, "release, failed committing timeout ?"), (2.5, YES, "")],
    "a read that ends after the deadline has no grace": [requested(timeout_s=1.0), READY, grant(),
        (1, READ, "stop, failed reading timeout drains, release, freed")],
    # a yes that is asked for and does not come
    "an end of the engine while a yes is on its way leaves open what became of the offer": [*ASKED,
        (0, LOST, "release, failed committing engine_lost ?")],
    "a cancel while a yes is on its way leaves it open": [*ASKED,
        (0, CANCEL, "ok, release, cancelled committing cancelled ?")],
    "a refusal does not leave it open": [*ASKED,
        (0, refused(EXPIRED), "release, failed committing offer_expired")],
    # chunks of an offer that is still computed
    "chunks of the wanted size are reported as they land, after the next read": [
        requested(first_token=3, chunk_tokens=8), READY, (grant(), "read 3-8"),
        (READ, "read 8-16, landed 8"), (READ, "read 16-24, landed 16"),
        (READ, "read 24-32 last, landed 24"), (READ, "commit, landed 32")],
    "a chunk ends where the ready tokens do though the engine wants larger ones": [
        requested(chunk_tokens=16), READY, (grant(8), "read 0-8"), (READ, "landed 8"), HINT,
        (grant(32, after=8), "read 8-16")],
    "no chunk goes beyond the tokens that were asked for": [requested(), READY,
        (grant(40), "read 0-32")],
    "a fetch that has all tokens waits for the seal and then commits": [requested(), READY,
        grant(32, sealed=False), (READ, ""), HINT, (grant(32, after=32), "commit")],
    "the state is read as a last chunk without tokens once the offer is sealed": [STATE, READY,
        grant(32, sealed=False), (READ, ""), HINT, (grant(32, after=32), "read 32-32 last"),
        (READ, "commit")],
    "a seal during the chunk that ends at the last token is not in that chunk": [STATE, READY,
        grant(32, sealed=False), HINT, (grant(32, after=32), ""), (READ, "read 32-32 last")],
    "an engine that has everything commits after the seal": [requested(first_token=32), READY,
        (grant(32, sealed=False), ""), HINT, (grant(32, after=32), "commit")],
    "an offer that is open again after its seal fails the fetch": [*READING, HINT,
        (0, grant(32, sealed=False, after=32), "stop, failed reading invalid drains")],
    "a fetch that failed between two chunks starts no other": [requested(), READY, grant(16), HINT,
        NOT_READ, (replace(grant(32, after=16), message=RENEW), "resolve")],
    # reads by the ticket's own blocks
    "a short read asks once after its last byte": [(ALONE, "hold, read 0-32 last"),
        (READ, "commit with blocks"), (YES, "completed")],
    "a long read acquires the lease and commits under it": [ALONE,
        (LIMITS.acquire_after_s, DUE, "acquire"), (1, grant(at=1), ""), (READ, "commit")],
    "an acquire beside the read is followed by the commit when both are there, read last": [
        (BESIDE, "hold, acquire, read 0-32 last"), (grant(), ""), (READ, "commit")],
    "a read goes on while another reader has the lease and commits what that gave back": [BESIDE,
        (failed(BUSY), ""), (0.1, READ, "commit with blocks")],
    "an acquire that was busy is sent again while the read lasts": [BESIDE, failed(BUSY),
        (0.25, DUE, "acquire")],
    "an acquire beside the read that is refused stops the read and drains": [BESIDE,
        (failed(ErrorCode.OFFER_COMPLETED), "stop, failed reading offer_completed drains"),
        (READ, "freed")],
    "a commit that was busy is asked again after a moment until the deadline": [ALONE, READ,
        (failed(BUSY), ""), (0.25, DUE, "commit with blocks"), (59.9, failed(BUSY)),
        (60, DUE, "failed committing timeout")],
    "a commit that is busy after the deadline is not sent again and was decided": [ALONE, READ,
        (60.5, failed(BUSY), "failed committing timeout")],
    "an offer with other blocks than the ticket fails and gives the lease back": [BESIDE,
        (grant(32, after=8), "stop, failed reading geometry drains"), (READ, "release, freed")],
    "a lease granted to a fetch that drains goes back when it has drained": [BESIDE, CANCEL,
        (grant(), ""), (READ, "release, freed")],
    "an engine that has all tokens commits the offer without a read or a lease": [
        (known(speculative=BOTH, first_token=32), "hold, commit with blocks")],
    # parked offers
    "a fetch whose offer was parked goes on in the pool without a pause, in the same attempt": [
        known(), (parked(), "end"), (DUE, "resolve"), (ready(attempt=2), "acquire"),
        (grant(attempt=2), "read 0-32 last"), (READ, "commit"), (yes(2), "completed")],
    "so does one whose handshake finds it": [requested(), (parked_at_handshake(), "end"),
        (DUE, "resolve"), (ready(attempt=2), "acquire")],
    "what was read before it was parked is read again": [ALONE, READ, (parked(), "end"),
        (DUE, "resolve"), (ready(attempt=2), "acquire"), (grant(attempt=2), "read 0-32 last")],
    "a read of an offer that was parked is stopped before the next": [BESIDE, (parked(), "stop"),
        (1, READ, "end"), (DUE, "resolve")],
    "tokens that an earlier attempt has read of the engine are read again": [
        requested(chunk_tokens=16), READY, (grant(), "read 0-16"),
        (READ, "read 16-32 last, landed 16"), (GONE, "stop"), (READ, "release, end"),
        (DUE, "resolve"), ready(attempt=2), (parked(2), "end"), (DUE, "resolve"), ready(attempt=3),
        (grant(attempt=3), "read 0-16")],
    "a failure behind the move is the first": [known(), parked(), DUE,
        (replace(GONE, attempt=2), "end"), (DUE, "resolve"), ready(attempt=3), grant(attempt=3),
        READ, (yes(3), "completed #2")],
    "an offer is not parked in one pool twice, nor in none": [known(), parked(), DUE,
        ready(attempt=2), (parked(2), "failed acquiring offer_parked"), known("f2"),
        (replace(refused(ErrorCode.OFFER_PARKED), fetch_id="f2"),
         "failed acquiring offer_parked f2")],
    "a cancel while the read of a parked offer is stopped waits for it": [BESIDE, parked(),
        (CANCEL, "ok, cancelled reading cancelled drains"), (READ, "freed")],
    # whose turn it is
    "the next begins in the event that ends one": [PLACE, known(), known("f2"), known("f3"),
        grant(), READ, (0.5, YES, "completed, acquire f2")],
    "the next begins when one waits for tokens": [PLACE, known(), known("f2"),
        (grant(0), "acquire f2")],
    "blocks that drain keep nobody from beginning": [PLACE, known(), known("f2"), grant(),
        (CANCEL, "ok, stop, cancelled reading cancelled drains, acquire f2")],
    "a fetch that stalls keeps its place for a bounded time": [PLACE, known(), known("f2"),
        (0.999, DUE, ""), (1, DUE, "acquire f2")],
    "agents have turns and the fetches of one have them in order": [PLACE,
        *[known(f"a{n}") for n in range(4)], *[known(f"b{n}", boot="b") for n in range(2)],
        (1.001, DUE, "acquire a1"), (2.002, DUE, "acquire b b0"), (3.003, DUE, "acquire a2"),
        (4.004, DUE, "acquire b b1"), (5.005, DUE, "acquire a3")],
    "a queued fetch fails at its deadline and says where it was": [PLACE, known(),
        known("f2", timeout_s=0.5), (0.5, DUE, "failed queued timeout f2")],
    "a cancelled fetch does not wait any more": [PLACE, known(), known("f2"), known("f3"),
        ev.CancelRequested("f2", "c"), (CANCEL, "ok, cancelled acquiring cancelled, acquire f3")],
    "a new fetch that comes late does not have the turn of one that waits": [PLACE, known(),
        known("f2"), (1, known("f3"), "hold f3, acquire f2"), (2, DUE, "acquire f3")],
    "the urgent one begins first of those that wait": [PLACE, known(), known("f2"),
        known("f3", priority=1), grant(), READ, (YES, "completed, acquire f3")],
    # ranks at other agents
    "other agents are asked with the first grant and the offer is committed when all have ended": [
        requested(remote_ranks=OTHERS), READY, (grant(), "ask others, read 0-32 last"), (READ, ""),
        (OTHERS_DONE, "commit"), (YES, "completed")],
    "other agents that are faster are not waited for": [*SPREAD, (0, OTHERS_DONE, ""),
        (READ, "commit")],
    "the lease is renewed while other agents read": [*WAITS, (3, DUE, "renew"),
        (grant(after=32, at=3.0), ""), (6, DUE, "renew")],
    "what grows is read here while other agents read": [requested(remote_ranks=OTHERS), READY,
        (grant(0), "ask others"), (1, HINT, "renew"), (grant(32), "read 0-32 last"), (READ, ""),
        (OTHERS_DONE, "commit")],
    "chunks are reported when they are in the blocks of all ranks": [
        requested(remote_ranks=OTHERS, chunk_tokens=16), READY, grant(), (READ, "read 16-32 last"),
        (OTHERS_DONE, "landed 16"), (READ, "commit, landed 32")],
    "a part that fails stops the others and the blocks come back with the last of them": [*SPREAD,
        (0, NO_PART, "stop, failed reading engine_lost drains"), (READ, ""),
        (OTHERS_DONE, "release, freed")],
    "a part that fails when all is here stops the others": [*WAITS,
        (0, NO_PART, "stop, failed waiting engine_lost drains"), (OTHERS_DONE, "release, freed")],
    "a read that fails here stops the other agents": [*SPREAD, (0, NOT_READ, "stop"),
        (OTHERS_DONE, "release, end")],
    "the next attempt starts when all parts have ended, and asks for them again": [*SPREAD,
        (0, GONE, "stop"), (READ, ""), (0.1, OTHERS_DONE, "release, end"), (DUE, "resolve"),
        (ready(attempt=2), "acquire"), (grant(attempt=2), "ask others"),
        (0.2, OTHERS_DONE, "commit")],
    "a part that fails for good ends an attempt that is already stopped": [*SPREAD,
        (0, GONE, "stop"), (NO_PART, "failed reading engine_lost drains")],
    # attempts
    "an agent that is gone is found again, and its next process is named": [*READING,
        (0, GONE, "stop"), (0.2, READ, "release, end"), (DUE, "resolve"),
        (0.3, ready(boot="new", attempt=2), "acquire new"), (grant(attempt=2), "commit new"),
        (0.4, yes(2), "completed #2")],
    "tokens that landed are not read again": [requested(chunk_tokens=8), READY, grant(), READ,
        (NOT_READ, "release, end"), (DUE, "resolve"), (ready(attempt=2), "acquire"),
        (grant(attempt=2), "read 8-16")],
    "tokens that only a ticket named are read again": [ALONE, READ,
        (refused(ErrorCode.DRAINING), "end"), (DUE, "resolve"), (ready(attempt=2), "acquire"),
        (grant(attempt=2), "read 0-32 last")],
    "tokens of an offer whose memory at other agents has changed are read again": [requested(),
        ready(elsewhere=("m1",)), grant(16), READ, (GONE, "release, end"), (DUE, "resolve"),
        ready(attempt=2, elsewhere=("m2",)), (grant(attempt=2), "read 0-32 last")],
    "tokens of an earlier data process are read again": [requested(), ready(nixl="A"), grant(16),
        read_from("A"), (GONE, "release, end"), (DUE, "resolve"), ready(attempt=2, nixl="B"),
        (grant(attempt=2), "read 0-32 last"), (read_from("B"), "commit of B")],
    "tokens that another attempt read from the same data process, or mapped, are not": [requested(),
        ready(nixl="A"), grant(16), read_from("A"), (GONE, "release, end"), (DUE, "resolve"),
        ready(attempt=2, nixl="A"), (grant(attempt=2), "read 16-32 last"), (READ, "commit of A")],
    "a commit of what an earlier data process sent is refused, and all is read again": [requested(),
        ready(nixl="A"), grant(), (read_from("A"), "commit of A"), (refused(STALE), "release, end"),
        (DUE, "resolve"), ready(attempt=2, nixl="B"), (grant(attempt=2), "read 0-32 last")],
    "a commit without an answer is repeated before anything is read from the next data process": [
        requested(), ready(nixl="A"), grant(), read_from("A"), (GONE, "end"),
        (DUE, "hold, commit with blocks of A"), (refused(STALE, 2), "end"), (0.1, DUE, "resolve"),
        (ready(attempt=3, nixl="B"), "commit with blocks of A"), (refused(STALE, 3), "end"),
        (0.3, DUE, "resolve"), (ready(attempt=4, nixl="B"), "acquire"),
        (grant(attempt=4), "read 0-32 last")],
    "an offer may not shrink between two attempts": [requested(), READY, grant(16), READ, GONE, DUE,
        ready(attempt=2), (grant(8, attempt=2), "release, failed acquiring invalid #2")],
    "an answer to the attempt before changes nothing, but gives its lease back": [requested(),
        READY, (GONE, "end"), (DUE, "resolve"), (grant(), "release"), (ready(), ""), (GONE, ""),
        (ready(attempt=2), "acquire"), (failed(STALE), "")],
    "a lease granted during the pause goes back": [requested(), READY, GONE, DUE, ready(attempt=2),
        (step_failed(STALE, 2), "end"), (0.01, grant(attempt=2), "release")],
    "a lease granted to an attempt that drains goes back when it has drained": [BESIDE,
        (GONE, "stop"), (grant(), ""), (READ, "release, end")],
    "the pauses between attempts grow": [requested(), (GONE, "end"), (DUE, "resolve"),
        (step_failed(STALE, 2), "end"), (0.024, DUE, ""), (0.05, DUE, "resolve"),
        (1, step_failed(STALE, 3), "end"), (1.049, DUE, ""), (1.1, DUE, "resolve")],
    "an attempt that fails for good is the last": [requested(), GONE, DUE,
        (step_failed(EXPIRED, 2), "failed resolving offer_expired #2")],
    "without time for another attempt a fetch fails with what went wrong": [
        requested(timeout_s=0.02), GONE, DUE, (step_failed(STALE, 2), "failed resolving stale #2")],
    "a fetch that is cancelled in a pause ends at once": [requested(), GONE, DUE,
        step_failed(STALE, 2), (0.01, CANCEL, "ok, cancelled resolving cancelled #2")],
    "a fetch that is cancelled while an attempt ends drains": [*READING, GONE,
        (0, CANCEL, "ok, cancelled reading cancelled drains"), (READ, "release, freed")],
    "an attempt whose transfers never end is over at the deadline": [*READING, GONE,
        (60, DUE, "failed reading timeout drains"), (90, READ, "release, freed")],
    "a rendezvous asks the next process again": [awaiting(), (failed(PEER_LOST), "end"),
        (DUE, "hold, await_offer"), (answered(AWAIT, TICKET, attempt=2), "resolve")],
    "a rendezvous that no engine can make fails at once": [awaiting(),
        (failed(NOT_READY), "failed awaiting engine_not_ready")],
    "a commit that got no answer is repeated first, and shows the blocks": [*ASKED,
        (0, GONE, "end"), (DUE, "hold, commit with blocks"), (yes(2), "completed #2")],
    "a commit that the next process does not know is repeated there": [*ASKED, GONE, DUE,
        (0, refused(STALE, 2), "end"), (0.05, DUE, "resolve"),
        (0.1, ready(boot="new", attempt=3), "commit new with blocks"), (yes(3), "completed #3")],
    "a commit whose end is unknown leaves it open when the offer is gone": [*ASKED, GONE, DUE,
        refused(STALE, 2), (0.05, DUE),
        (0.1, step_failed(ErrorCode.OFFER_UNKNOWN, 3), "failed resolving offer_unknown ? #3")],
    "a commit under a lease that ended is repeated under another": [*ASKED,
        (0, refused(LEASE_EXPIRED), "release, end"), (DUE, "resolve"),
        (ready(attempt=2), "acquire"), (grant(attempt=2), "commit")],
    "the parts of an engine that is gone are waited for": [*WAITS,
        (0, LOST, "stop, failed waiting engine_lost drains"), (OTHERS_DONE, "release, freed")],
    # a fetch that an earlier process of the agent had
    "a repeated fetch reads once it is known that the earlier process did not commit it": [
        (AGAIN, "hold, query"), (DENIED, "resolve"), (READY, "acquire"),
        (grant(), "read 0-32 last"), (READ, "commit"), (YES, "completed")],
    "a repeated fetch that the earlier process has committed completes without a read": [AGAIN,
        (COMMITTED, "completed")],
    "a repeated fetch whose route is known begins after the answer": [
        (known(repeated=2), "hold, query"), (DENIED, "acquire")],
    "a repeated rendezvous asks for its ticket after the answer": [
        (awaiting(repeated=1), "hold, query"), (DENIED, "await_offer"), (MET, "resolve")],
    "a query is repeated until there is an answer, and leaves nothing open": [AGAIN,
        (answered(QUERY, RemoteError("no", code=NOT_READY)), "end"), (DUE, "hold, query"),
        (1, step_failed(PEER_LOST, 2), "end"), (60, DUE, "failed committing timeout #2")],
    "an attempt after the answer does not ask again": [AGAIN, DENIED, READY, (GONE, "end"),
        (DUE, "resolve")],
    "the parts of the earlier process end before anything else": [(SPREAD_AGAIN, "hold, end parts"),
        (OTHERS_DONE, "query"), (COMMITTED, "completed")],
    "blocks drain while parts of the earlier process are in flight": [SPREAD_AGAIN,
        (CANCEL, "ok, stop, cancelled committing cancelled drains"), (OTHERS_DONE, "freed")],
    "an attempt that fails meanwhile waits for the parts of the earlier process": [SPREAD_AGAIN,
        (GONE, "stop"), (OTHERS_DONE, "end"), (DUE, "hold, query")],
    # what comes late, or does not fit
    "a commit that was sent by the deadline completes the fetch a little later": [
        requested(timeout_s=1.0), READY, grant(), (0.999, READ), (1.99, DUE, ""),
        (YES, "completed")],
    **{f"a renewal that is answered during the commit does not disturb it, {number}":
        [*READING, HINT, READ, (0, late, ""), (YES, "completed")]
        for number, late in enumerate(LATE)},
    **{f"{what} that no chunk can follow fails the fetch":
        [requested(), READY, grant(16), HINT,
         (grant(**news), "stop, failed reading invalid drains"),
         requested("f2"), ready("f2"), grant(16, fetch_id="f2"), read(fetch_id="f2"),
         ev.OfferAdvanced("f2"),
         (grant(**news, fetch_id="f2"), "release, failed waiting invalid f2")]
        for what, news in NEWS.items()},
    "an end that was cancelled on the way has failed as well": [*ASKED,
        (0, failed(ErrorCode.CANCELLED), "release, failed committing cancelled ?")],
    # an engine that gives up for good
    **{f"a cancel that releases its offer withdraws it, {number}": [*before, (0, GIVE_UP, words)]
        for number, (before, words) in enumerate([
            ([requested(), READY], "ok, cancelled acquiring cancelled, withdraw"),
            (READING, "ok, stop, cancelled reading cancelled drains, withdraw"),
            ([requested(), failed(EXPIRED)], "ok, withdraw"),
            ([requested(), READY, CANCEL], "ok, withdraw"),
            ([*ASKED, YES], "ok"),
        ])},
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_the_table_says_to_what_comes(script: list[Step]) -> None:
    play(*script)


# fmt: off
SITUATIONS: dict[str, list[Step]] = {
    "awaiting": [awaiting()], "resolving": [requested()], "queued": [PLACE, known("f0"), known()],
    "acquiring": [known()], "waiting": WAITING, "reading": READING, "speculative": [BESIDE],
    "committing": ASKED, "spread": SPREAD, "for others": WAITS, "repeated": [AGAIN],
    "repeated elsewhere": [SPREAD_AGAIN], "retrying": [*READING, GONE],
    "pausing": [requested(), GONE, DUE, step_failed(STALE, 2)], "draining": [*READING, CANCEL],
    "completed": [*ASKED, YES], "failed": [requested(), failed(EXPIRED)],
}
ANYTHING: list[ev.Event] = [
    COMMITTED, DENIED, OTHERS_DONE, MET, READY, ev.TurnCame("f1"), grant(), failed(BUSY),
    failed(STALE), renew_failed(TIMEOUT), HINT, YES, CANCEL, GIVE_UP, GONE, LOST, STOPPED, DUE,
]
# fmt: on
LAST = (0.5, READ), (100.0, DUE), (100.0, READ), (100.0, OTHERS_DONE)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_any_event_in_any_state_ends_fetch_and_frees_blocks_once(situation: str) -> None:
    for first, second in product(ANYTHING, ANYTHING):
        table = play(*SITUATIONS[situation])
        words = [
            word
            for now, event in ((0.5, first), (0.5, second), *LAST)
            for word in said(tell(table, event, now))
            if word.startswith(("completed", "failed", "cancelled", "freed")) and " f0" not in word
        ]
        ends = [word for word in words if word != "freed"]
        assert len(ends) == (situation not in {"draining", "completed", "failed"})
        drains = situation == "draining" or any("drains" in word for word in ends)
        assert words.count("freed") == drains
        assert "f1" not in table.live


@pytest.mark.parametrize("end", [CANCEL, NO_PART, LOST, STOPPED, renew_failed(EXPIRED)])
def test_given_up_read_is_told_now_and_its_blocks_when_terminal(end: ev.Event) -> None:
    table = play(*READING)
    ended, drained = said(tell(table, end, 0.0)), said(tell(table, READ, 1.0))
    assert "stop" in ended
    assert ended[-1].endswith("drains")
    assert drained == ["release", "freed"]
    assert not table.live


def test_busy_offer_is_acquired_again_at_hint_or_a_little_later() -> None:
    due_at = {(1.0, 0.0): 1.0, (1.0, 0.5): 1.5, (3600.0, 0.0): 2.0, (-1.0, 0): 0.001}
    for (hint_s, jitter), expected in {**due_at, (math.nan, 0): 0.001}.items():
        busy = failed(BUSY, jitter=jitter, retry_after_s=hint_s)
        assert play(requested(timeout_s=10.0), READY, busy).deadlines.next() == expected


def test_a_retry_that_comes_after_the_deadline_names_why_the_handshake_failed() -> None:
    """A late timer, as on a busy machine: the pause ended before the deadline."""
    table, unreachable = play(requested(timeout_s=10.0)), ErrorCode.PEER_UNREACHABLE
    tell(table, step_failed(unreachable), 1.0)
    tell(table, DUE, 1.0)
    tell(table, step_failed(unreachable, attempt=2), 9.9)
    (fetched,) = [
        one.fetched for one in tell(table, DUE, 10.5) if isinstance(one, ev.ReportFetched)
    ]
    assert (fetched.code, fetched.stage) == (unreachable, "resolving")


def test_timeouts_of_requests_end_with_fetch_or_its_grace() -> None:
    """An `Acquire` has less: its agent may be gone."""
    acquired: list[Any] = [requested(timeout_s=9.0), READY, grant()]
    for kind, steps, last, at_s, timeout_s in (
        (AwaitOffer, [], awaiting(timeout_s=9.0), 0.0, 10.0),
        (Acquire, acquired[:1], READY, 0.0, 5.0),
        (Renew, acquired, HINT, 0.0, 10.0),
        (Commit, acquired, READ, 0.0, 10.0),
        (Commit, acquired, READ, 3.0, 7.0),
        (Commit, acquired, READ, 8.5, 1.5),
    ):
        asked = commands_of(kind, *steps, last=last, now=at_s)
        assert asked.timeout_s == pytest.approx(timeout_s), kind
        assert not isinstance(asked.message, AwaitOffer) or asked.message.wait_s == 9.0


def test_requests_name_their_blocks_ticket_and_token() -> None:
    speculative = commands_of(ev.ReadChunk, last=ALONE)
    commit = commands_of(Commit, ALONE, last=READ)
    under_lease = commands_of(Commit, *READING, last=READ)
    first = commands_of(ev.ReadChunk, requested(), READY, last=grant(8))
    renew = commands_of(Renew, requested(), ready(nixl="data 0"), grant(8), last=HINT)
    commit_from = commands_of(Commit, *READING, last=read_from("data 0"))
    acquire = commands_of(Acquire, awaiting(), MET, last=READY).message
    release = commands_of(Release, requested(), READY, CANCEL, last=grant(epoch=4)).message
    assert speculative.tables == commit.message.tables == TABLES
    assert under_lease.message.tables is None, "what was read is what the lease named"
    assert (first.tables, renew.message.known_blocks) == (blocks(8), {"full": 1})
    assert renew.message.nixl_agent == commit_from.message.nixl_agent == "data 0"
    assert (acquire.agent_boot, acquire.offer_id, acquire.secret) == ("boot", "o1", "secret")
    assert release == Release(**OF, epoch=4, token="token", code="cancelled")


def test_the_blocks_of_a_chunk_do_not_grow_under_its_read() -> None:
    table = play(requested(), READY)
    (first,) = tell(table, grant(8), 0.0)
    tell(table, HINT, 0.0)
    tell(table, grant(32, after=8), 0.0)
    assert isinstance(first, ev.ReadChunk)
    assert first.tables == blocks(8)


def test_report_adds_up_chunks_and_time_of_each_stage() -> None:
    steps: list[Step] = [
        *(STATE, READY, (1, grant(16, at=1)), (2, read(300, "packed")), (2.5, HINT)),
        *(grant(32, sealed=False, after=16, at=2.5), (2.75, read(200, "direct")), (3, HINT)),
        *(grant(32, after=32, at=3), (3.25, read(0, ""))),
    ]
    report = commands_of(ev.ReportFetched, *steps, last=YES, now=4.0).fetched
    waited: list[Step] = [PLACE, known(), known("f2"), (0.5, CANCEL), grant(fetch_id="f2")]
    queued = commands_of(ev.ReportFetched, *waited, last=ev.CancelRequested("f2", "c"), now=2.0)
    assert (report.num_bytes, report.path) == (500, "direct")
    assert (report.stages_s.waiting, report.stages_s.reading) == (0.75, 1.5)
    assert queued.fetched.stages_s.queued == 0.5
    for first, flags in ((ALONE, (True, False)), (BESIDE, (True, True)), (known(), (False, True))):
        granted = [] if first is ALONE else [grant()]
        end = commands_of(ev.ReportFetched, first, *granted, READ, last=YES)
        assert (end.requested.speculative is not None, end.leased) == flags


def test_a_retired_fetch_keeps_no_resources_and_no_tables_alive() -> None:
    table = play(replace(BESIDE, resources="a route"), grant(), READ, YES)
    (retired,) = table.retired.values()
    assert retired.requested.resources is None
    assert retired.requested.speculative is None


class Peers:
    """A prefill agent that restarts and loses answers; ``pick`` chooses each event.

    Bytes are right if they are of the offer's blocks, and of the data process of their attempt.
    """

    def __init__(self, pick: Callable[[Sequence[Any]], Any], first: ev.Requested, ready: int):
        self.pick, self.table, self.now, self.num_ready = pick, FetchTable(LIMITS), 0.0, ready
        self.boot, self.data, self.ends = "boot 0", "data 0", list[str]()
        self.attempt, self.granted_to, self.leases = 1, dict[int, int](), set[int]()
        self.nixl, self.waiting, self.right = {1: self.data}, list[Any](), [False] * 32
        self.chunk: ev.ReadChunk | None = None
        self.tell(first)

    def tell(self, event: ev.Event) -> None:
        for command in self.table.handle(event, self.now):
            match command:
                case ev.AcquirePeer() | ev.SendRequest():
                    assert self.chunk is None or command.attempt == self.attempt
                    self.attempt = command.attempt
                    self.waiting += [command] * (type(command) is not ev.AcquirePeer)
                    if isinstance(request := getattr(command, "message", None), Renew):
                        assert self.granted_to[request.epoch] == self.attempt
                case ev.ReadChunk():
                    assert self.chunk is None, "one chunk at a time"
                    assert not command.epoch or self.granted_to[command.epoch] == self.attempt
                    self.chunk = command
                case ev.EndAttempt() | ev.NotifyEngine(message=BlocksFreed()):
                    assert self.chunk is None
                    self.ends += ["freed"] * isinstance(command, ev.NotifyEngine)
                case ev.ReportFetched(fetched=fetched):
                    assert not (fetched.blocks_free and self.chunk)
                    assert fetched.code or all(self.right), "completed with wrong bytes"
                    self.ends += ["ended", *["freed"] * fetched.blocks_free]

    def error(self) -> RemoteError | None:
        codes = PEER_LOST, STALE, ErrorCode.TRANSFER_FAILED, ErrorCode.DRAINING, BUSY
        code = self.pick([*codes, *[None] * 10])
        return None if code is None else RemoteError("no", code=code)

    def end_read(self) -> None:
        chunk, self.chunk, nixl, error = self.chunk, None, self.nixl[self.attempt], self.error()
        if chunk is not None and error is None:
            is_right = chunk.tables["full"].ids.startswith(blocks(chunk.stop)["full"].ids)
            is_right &= nixl == self.data
            self.right[chunk.start : chunk.stop] = [is_right] * (chunk.stop - chunk.start)
        self.tell(ev.ReadEnded("f1", 64, error, "direct", nixl_agent=nixl))

    def answer(self) -> None:
        command = self.waiting.pop(self.pick(range(len(self.waiting))))
        attempt, error = command.attempt, self.error()
        if isinstance(command, ev.SendRequest):
            outcome = error or self.outcome(command.message, attempt)
            self.tell(answered(command.message, outcome, attempt=attempt, sent_at=self.now))
        elif error is not None:
            self.tell(ev.StepFailed("f1", attempt, error))
        else:
            self.nixl[attempt] = self.data
            self.tell(ready(boot=self.boot, attempt=attempt, nixl=self.data))

    def outcome(self, message: Any, attempt: int) -> Any:
        epoch, known, refusal = getattr(message, "epoch", 0), 0, None
        if message.agent_boot != self.boot:
            refusal = STALE
        elif isinstance(message, Commit):
            if message.nixl_agent not in ("", self.data) or not (message.tables or self.leases):
                refusal = STALE
            elif message.tables not in (None, blocks(32)) or self.num_ready < 32:
                refusal = ErrorCode.GEOMETRY
        elif epoch:
            known = message.known_blocks.get("full", 0)
            refusal = None if epoch in self.leases else LEASE_EXPIRED
        else:
            epoch = len(self.granted_to) + 1
            self.granted_to[epoch], self.leases = attempt, self.leases | {epoch}
        if refusal is not None:
            return RequestRefused("no", code=refusal)
        granted = grant(self.num_ready, after=8 * known, epoch=epoch).outcome
        return protocol.Empty() if isinstance(message, Commit) else granted

    def restart(self) -> None:
        self.boot, self.leases = self.boot + "0", set()
        if (error := self.error()) is not None:
            self.tell(ev.StepFailed("f1", self.attempt, error))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(DUE)

    def go_on(self) -> None:
        happens: list[Callable[[], Any]] = [
            self.restart,
            lambda: setattr(self, "data", self.data + "0"),
            lambda: setattr(self, "num_ready", min(32, self.num_ready + 8)),
            lambda: self.wait(self.pick([0.0, 0.06, 1.1, 4.0])),
            lambda: self.tell(HINT),
        ]
        happens += [self.answer] * 4 * bool(self.waiting) + [self.end_read] * 3 * bool(self.chunk)
        self.pick(happens)()


@settings(max_examples=num_examples(800))
@given(st.data())
def test_attempts_follow_each_other_and_keep_only_what_counts(data: st.DataObject) -> None:
    def pick(of: Sequence[Any]) -> Any:
        return data.draw(st.sampled_from(of))

    altered = SpeculativeRead({"full": BlockTable.of([7, 101, 102, 103])}, acquires=False)
    first = requested(chunk_tokens=pick([0, 8]), boot="boot 0")
    if speculative := pick([None, BOTH, altered]):
        first = known(speculative=speculative, boot="boot 0", nixl_agent="data 0")
    peers = Peers(pick, first, 32 if speculative else pick([8, 32]))
    for _ in range(data.draw(st.integers(0, 50))):
        peers.go_on()
    peers.wait(100.0)
    if peers.chunk is not None:
        peers.end_read()
    assert sorted(peers.ends) == ["ended", "freed"]
    assert not peers.table.live


def test_a_fetch_names_the_pool_where_it_reads_and_its_ticket_stays() -> None:
    moved: list[Any] = [requested(), parked_at_handshake()]
    route = commands_of(ev.FindRoute, *moved, last=DUE)
    acquire = commands_of(Acquire, *moved, DUE, last=ready(attempt=2))
    commit = commands_of(Commit, *moved, DUE, ready(attempt=2), grant(attempt=2), last=READ)
    source = route.requested.source
    assert (source.engine_id, source.engine_instance) == ("pool", "pool-boot")
    assert (source.blocks, source.cell) == ("", 0)
    assert route.requested.ticket == TICKET
    assert acquire.message.engine_id == "pool"
    assert commit.message.tables is None
    first = commands_of(Acquire, requested(), last=READY)
    assert first.message.engine_id == TICKET.engine_id
