"""The fetch table: what it asks for, what it reads, and what it tells the engine, and when.

Each case is a script: events, some with the time and what must be said to them. See `said`.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.errors import ErrorCode, RemoteError, RequestRefused
from kvbus.geometry import BlockTable
from kvbus.protocol import (
    Acquire,
    AgentRanks,
    AwaitOffer,
    BlocksFreed,
    Commit,
    CommitAnswer,
    CommitQuery,
    Decline,
    Empty,
    Granted,
    Landed,
    PeerWithdraw,
    Release,
    Rendezvous,
    Renew,
    Request,
    StartFetch,
    Ticket,
)
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
)
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchLimits, FetchState
from kvbus_decode.fetch.events import SpeculativeRead
from kvbus_decode.fetch.table import FetchTable
from tests.support.examples import num_examples

LIMITS = FetchLimits(max_fetches=2, request_timeout_s=5.0, busy_retry_s=0.25)
TICKET = Ticket("p", "boot", "tcp://p", "engine-p", "engine-boot", "o1", "r1", 32, "secret")
MEETS = Rendezvous("transfer-id-of-32-characters-here", "tcp://p:1", request_id="r1")
BUSY, TIMEOUT, STALE = ErrorCode.BUSY, ErrorCode.TIMEOUT, ErrorCode.STALE
EXPIRED = ErrorCode.OFFER_EXPIRED


def requested(fetch_id: str = "f1", *, boot: str = "boot", **changes: Any) -> ev.Requested:
    """A fetch of the tokens of an offer of 32; whose agent has to be found, unless `KNOWN`."""
    ticket = replace(TICKET, agent_boot=boot)
    asked = StartFetch(fetch_id=fetch_id, ticket={}, num_tokens=32, tables={})
    changed = {name: changes.pop(name) for name in StartFetch.__struct_fields__ if name in changes}
    ticket, timeout_s = changed.pop("ticket", ticket), changed.pop("timeout_s", 60.0)
    asked = replace(asked, **changed)
    one = ev.Requested(fetch_id, "engine-d", asked, ticket, timeout_s, "fetch")
    return replace(one, **changes)


def known(fetch_id: str = "f1", **changes: Any) -> ev.Requested:
    """One whose route is known."""
    return requested(fetch_id, has_route=True, **changes)


def awaiting(**changes: Any) -> ev.Requested:
    """A fetch of an offer that has not been made."""
    return requested(ticket=MEETS.unknown_ticket(), rendezvous=MEETS, **changes)


def blocks(num_tokens: int, after: int = 0) -> dict[str, BlockTable]:
    """Of 8 tokens each."""
    table = BlockTable.of(range(100 + after // 8, 100 + num_tokens // 8), first_block=after // 8)
    return {"full": table}


OF: dict[str, Any] = {"agent_boot": "boot", "offer_id": "o1"}
ACQUIRE = Acquire(**OF, reader_id="/f1", lease_s=9.0, secret="secret")
RENEW = Renew(**OF, epoch=1, lease_s=9.0, token="token")
COMMIT = Commit(**OF, reader_id="/f1", secret="secret", token="own")
MEET = AwaitOffer(transfer_id=MEETS.transfer_id, wait_s=1.0)


def answered(
    message: Request[Any],
    outcome: Any,
    *,
    fetch_id: str = "f1",
    attempt: int = 1,
    at: float = 0.0,
    jitter: float = 0.0,
) -> ev.Answered:
    return ev.Answered(fetch_id, attempt, message, outcome, TICKET, at, jitter)


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
    fetch_id: str = "f1",
    attempt: int = 1,
    at: float = 0.0,
) -> ev.Answered:
    """The answer to an acquire, or to a renewal that has the blocks of ``after`` tokens."""
    is_sealed = num_tokens == 32 if sealed is None else sealed
    granted = Granted(epoch, 9.0, num_tokens, is_sealed, blocks(num_tokens, after), "token")
    return answered(ACQUIRE, granted, fetch_id=fetch_id, attempt=attempt, at=at)


def failed(
    code: ErrorCode, jitter: float = 0.0, *, refused: bool = False, attempt: int = 1, **more: Any
) -> ev.Answered:
    """The answer to what the fetch has asked last."""
    error = (RequestRefused if refused else RemoteError)("it did not work", code=code, **more)
    return answered(ACQUIRE, error, attempt=attempt, jitter=jitter)


def renew_failed(code: ErrorCode) -> ev.Answered:
    return answered(RENEW, RemoteError("it did not work", code=code))


def read(num_bytes: int = 4096, path: str = "direct", fetch_id: str = "f1") -> ev.ReadEnded:
    return ev.ReadEnded(fetch_id, num_bytes, None, path)


def read_from(nixl: str) -> ev.ReadEnded:
    return replace(READ, nixl_agent=nixl)


READY, READ, YES, HINT = ready(), read(), answered(COMMIT, Empty()), ev.OfferAdvanced("f1")
MET = answered(MEET, TICKET)
State = FetchState
LAST_ASKED: dict[State, Request[Any]] = {State.AWAITING: MEET, State.COMMITTING: COMMIT}
CANCEL = ev.CancelRequested("f1", "cancel")
GIVE_UP = ev.CancelRequested("f1", "cancel", release_offer=True)
NO_PART, GONE = step_failed(ErrorCode.ENGINE_LOST), step_failed(ErrorCode.PEER_LOST)
LOST, STOPPED = EngineLost("engine-d"), Stopped()
NOT_READ = ev.ReadEnded("f1", 0, RemoteError("no", code=ErrorCode.TRANSFER_FAILED))
DUE = DeadlinePassed()
READING: list[Any] = [requested(), READY, grant()]
WAITING: list[Any] = [requested(), READY, grant(0)]
ASKED: list[Any] = [*READING, READ]
OTHERS = (AgentRanks("tcp://other:1", (1,), "access-of-16-chars"),)
SPREAD: list[Any] = [requested(remote_ranks=OTHERS), READY, grant()]
WAITS: list[Any] = [*SPREAD, READ]
OTHERS_DONE = ev.ReadEnded("f1", 4096, None, "direct", elsewhere=True)
AGAIN, SPREAD_AGAIN = requested(repeated=1), requested(repeated=1, remote_ranks=OTHERS)
QUERY = CommitQuery(secret="secret", token="own", reader_boot="next", offer_id="o1")
COMMITTED, DENIED = (answered(QUERY, CommitAnswer(is_so, 32)) for is_so in (True, False))
WORDS = {
    SendReply: "ok",
    ev.StopReads: "stop",
    ev.AskOthers: "ask others",
    ev.EndAttempt: "end",
    ev.AcquirePeer: "hold",
    ev.FindRoute: "resolve",
    BlocksFreed: "freed",
    Landed: "landed",
    AwaitOffer: "await_offer",
    Acquire: "acquire",
    Renew: "renew",
    CommitQuery: "query",
    ev.EndEarlierParts: "end parts",
    Commit: "commit",
    Decline: "decline",
    Release: "release",
    PeerWithdraw: "withdraw",
}


def said(commands: list[ev.Command]) -> list[str]:
    """One word for each command; of other fetches than f1 with their name."""
    return [_word(one) + _name(one) for one in commands]


def _name(command: Any) -> str:
    name = getattr(getattr(command, "requested", command), "fetch_id", "f1")
    return "" if name == "f1" else f" {name}"


def _word(command: ev.Command) -> str:
    match command:
        case Refuse():
            return str(command.error.code)
        case (
            ev.Ask(message=message)
            | ev.NotifyAgent(message=message)
            | ev.NotifyEngine(message=message)
        ):
            word = WORDS[type(message)]
            if isinstance(message, Acquire | Commit | Renew) and message.agent_boot != "boot":
                word += f" {message.agent_boot}"
            if (
                isinstance(message, Commit)
                and message.tables is not None
                and message.offer_id == "o1"
            ):
                word += " with blocks"
            if isinstance(message, Commit) and message.nixl_agent:
                word += f" of {message.nixl_agent}"
            return word + (f" {message.num_tokens}" if isinstance(message, Landed) else "")
        case ev.ReadChunk():
            return f"read {command.start}-{command.stop}" + command.last * " last"
        case ev.ReportFetched():
            return _end(command)
    return WORDS[type(command)]


def _end(report: ev.ReportFetched) -> str:
    """``drains`` when the blocks are not free, ``?`` when the offer may be completed."""
    fetched = report.fetched
    how = f" {fetched.stage} {fetched.code}" if fetched.code else ""
    is_open = " drains" * (not fetched.blocks_free) + " ?" * report.undecided
    attempts = f", {fetched.attempts} attempts" * (fetched.attempts > 1)
    return fetched.outcome.value + how + is_open + attempts


def tell(table: FetchTable, event: ev.Event, now: float) -> list[ev.Command]:
    """An answer to `ACQUIRE` is the one to what its fetch has asked last."""
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


Step = ev.Event | tuple[float, ev.Event] | tuple[float, ev.Event, list[str]] | FetchLimits


def play(*steps: Step) -> FetchTable:
    """Tell a table each event; an event alone comes when the one before did."""
    table, now = FetchTable(LIMITS), 0.0
    for step in steps:
        if isinstance(step, FetchLimits):
            table = FetchTable(step)
            continue
        what: Any = step if isinstance(step, tuple) else (now, step)
        now, event, *expected = what
        words = said(tell(table, event, now))
        assert expected in ([], [words]), (now, event)
    return table


def commands_of(kind: type[Any], *steps: Step, last: ev.Event, now: float = 0.0) -> Any:
    """The one command of that kind that the last event brings."""
    table = play(*steps)
    (found,) = (
        one
        for one in tell(table, last, now)
        if isinstance(one, kind) or isinstance(getattr(one, "message", None), kind)
    )
    return found


TABLES = {"full": BlockTable.of([100, 101, 102, 103])}
ALONE = known(speculative=SpeculativeRead(TABLES, acquires=False))
BESIDE = known(speculative=SpeculativeRead(TABLES, acquires=True))
STATE = requested(has_state=True)
PLACE = FetchLimits(num_places=1, place_timeout_s=1.0)
LATE: list[ev.Event] = [
    *(renew_failed(TIMEOUT), renew_failed(STALE), grant(32, after=32), grant(32, after=8))
]
NEWS: dict[str, dict[str, Any]] = {
    "fewer tokens": {"num_tokens": 8, "after": 8},
    "a seal of too few": {"num_tokens": 16, "after": 16, "sealed": True},
    "another epoch": {"num_tokens": 24, "after": 16, "epoch": 2},
}
# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    # from the request to the yes
    "a fetch resolves, acquires, reads, commits and has completed":
        [(0, requested(), ["resolve"]), (0, READY, ["acquire"]),
         (0, grant(), ["read 0-32 last"]), (0, READ, ["commit"]), (0, YES, ["completed"])],
    "a fetch of an offer that is not made asks for its ticket first":
        [(0, awaiting(), ["hold", "await_offer"]), (0, MET, ["resolve"]),
         (0, READY, ["acquire"])],
    "the ticket is asked for until the deadline":
        [awaiting(timeout_s=1.0), (0, failed(BUSY), []), (0.25, DUE, ["await_offer"]),
         (0.9, failed(BUSY), []),
         (1, DUE, ["failed awaiting timeout"])],
    "who gives up before the offer is made has it forgone, also later":
        [awaiting(), (0, GIVE_UP, ["ok", "cancelled awaiting cancelled", "decline"]),
         (0, GIVE_UP, ["ok", "decline"])],
    "a fetch whose route is known acquires at once":
        [(0, known(), ["hold", "acquire"])],
    "an engine that has all tokens reads nothing and commits":
        [requested(first_token=32), READY, (0, grant(), ["commit"])],
    "a commit that is refused fails the fetch though all bytes have landed":
        [*ASKED, (0, failed(EXPIRED), ["release", "failed committing offer_expired ?"])],
    "a lease that is granted after the end is given back":
        [requested(), READY, CANCEL, (0, grant(epoch=4), ["release"])],
    "an offer that is sealed with too few tokens fails the fetch":
        [requested(), READY, (0, grant(16, sealed=True), ["release", "failed acquiring invalid"])],
    "a cancel is answered after the end, and unknown of what never was":
        [requested(), CANCEL, (0, CANCEL, ["ok"]),
         (0, ev.CancelRequested("never", "c"), ["fetch_unknown"])],
    "a fetch that drains keeps its place until its transfers end":
        [*READING, CANCEL, requested("f2"), (0, requested("f3"), ["busy"]), READ,
         (0, requested("f3"), ["resolve f3"])],
    "a fetch is not committed twice, nor after its end":
        [requested(), (0, requested(), ["fetch_exists"]), CANCEL,
         (0, requested(), ["fetch_exists"])],
    "an agent that drains commits no fetch":
        [DrainStarted(), (0, requested(), ["draining"])],
    # renewals, and news of the offer
    "a renewal that found its agent busy is sent again while the lease lasts":
        [*READING, HINT, (1, renew_failed(BUSY), []), (1.2, DUE, []), (1.3, DUE, ["renew"]),
         (8.9, renew_failed(BUSY)), (9, DUE, ["stop"])],
    "a lease that runs out stops the read without waiting for its renewal":
        [*READING, (3, DUE, ["renew"]), (9, DUE, ["stop"]), (9.5, DUE, []),
         (10, READ, ["release", "end"]), (10, DUE, ["resolve"])],
    "a hint that overtakes the acquire's answer makes it ask once more":
        [requested(), READY, (0, HINT, []), (0, grant(0), ["renew"])],
    "a hint that overtakes a renewal's answer makes it ask once more":
        [*WAITING, HINT, (0, HINT, []), (0, grant(0), ["renew"])],
    "hints during a renewal ask once more after it and not more often":
        [requested(), READY, grant(8), (0, HINT, ["renew"]), (0, HINT, []), (0, HINT, []),
         (0, grant(16, after=8), ["renew"]), (0, grant(24, after=16), [])],
    "a busy offer is acquired again at once when there is news of it":
        [requested(), READY, (0, failed(BUSY), []), (0, HINT, ["acquire"])],
    "news that come while an acquire is under way are newer than its refusal":
        [requested(), READY, (0, HINT, []), (0, failed(BUSY), ["acquire"]), (0, failed(BUSY), []),
         (0.25, DUE, ["acquire"])],
    "a busy offer is acquired again after a moment until the deadline":
        [requested(timeout_s=1.0), READY, failed(BUSY), (0.25, DUE, ["acquire"]),
         (0.9, failed(BUSY), []), (1, DUE, ["failed acquiring timeout"])],
    "blocks in the grant that leave a gap fail the fetch and give the lease back":
        [*WAITING, HINT, (0, grant(32, after=16), ["release", "failed waiting geometry"])],
    # the last question
    "without an answer a fetch fails when its grace is over and a yes after it is nothing":
        [requested(timeout_s=1.0), READY, grant(), READ,
         (2, DUE, ["release", "failed committing timeout ?"]), (2.5, YES, [])],
    "a read that ends after the deadline has no grace":
        [requested(timeout_s=1.0), READY, grant(),
         (1, READ, ["stop", "failed reading timeout drains", "release", "freed"])],
    # a yes that is asked for and does not come
    "an end of the engine while a yes is on its way leaves open what became of the offer":
        [*ASKED, (0, LOST, ["release", "failed committing engine_lost ?"])],
    "a cancel while a yes is on its way leaves it open":
        [*ASKED, (0, CANCEL, ["ok", "release", "cancelled committing cancelled ?"])],
    "a refusal does not leave it open":
        [*ASKED,
         (0, ev.StepFailed("f1", 1, RequestRefused("no", code=EXPIRED)),
          ["release", "failed committing offer_expired"])],
    # chunks of an offer that is still computed
    "chunks of the wanted size are told of as they land, after what follows them":
        [requested(first_token=3, chunk_tokens=8), READY, (0, grant(), ["read 3-8"]),
         (0, READ, ["read 8-16", "landed 8"]), (0, READ, ["read 16-24", "landed 16"]),
         (0, READ, ["read 24-32 last", "landed 24"]), (0, READ, ["commit", "landed 32"])],
    "a chunk ends where the ready tokens do though the engine wants larger ones":
        [requested(chunk_tokens=16), READY, (0, grant(8), ["read 0-8"]), (0, READ, ["landed 8"]),
         HINT, (0, grant(32, after=8), ["read 8-16"])],
    "a chunk that did not land is not told of":
        [requested(chunk_tokens=8), READY, grant(),
         (0, NOT_READ, ["release", "end"])],
    "no chunk goes beyond the tokens that were asked for":
        [requested(), READY, (0, grant(40), ["read 0-32"])],
    "a fetch that has all tokens waits for the seal and then commits":
        [requested(), READY, grant(32, sealed=False), (0, READ, []), HINT,
         (0, grant(32, after=32), ["commit"])],
    "the state is read as a last chunk without tokens once the offer is sealed":
        [STATE, READY, grant(32, sealed=False), (0, READ, []), HINT,
         (0, grant(32, after=32), ["read 32-32 last"]), (0, READ, ["commit"])],
    "a seal during the chunk that ends at the last token is not in that chunk":
        [STATE, READY, grant(32, sealed=False), HINT, (0, grant(32, after=32), []),
         (0, READ, ["read 32-32 last"])],
    "an engine that has everything commits after the seal":
        [requested(first_token=32), READY, (0, grant(32, sealed=False), []), HINT,
         (0, grant(32, after=32), ["commit"])],
    "an engine that has everything but the state reads that after the seal":
        [requested(has_state=True, first_token=32), READY, (0, grant(32, sealed=False), []), HINT,
         (0, grant(32, after=32), ["read 32-32 last"]), (0, READ, ["commit"])],
    "an offer that is open again after its seal fails the fetch":
        [*READING, HINT,
         (0, grant(32, sealed=False, after=32), ["stop", "failed reading invalid drains"])],
    "a fetch that failed between two chunks starts no other":
        [requested(), READY, grant(16), HINT, NOT_READ,
         (0, replace(grant(32, after=16), message=RENEW), ["resolve"])],
    # reads by the ticket's own blocks
    "a short read asks once after its last byte":
        [(0, ALONE, ["hold", "read 0-32 last"]), (0, READ, ["commit with blocks"]),
         (0, YES, ["completed"])],
    "a read that takes long asks for the lease and takes under it":
        [ALONE, (LIMITS.acquire_after_s, DUE, ["acquire"]), (1, grant(at=1), []),
         (1, READ, ["commit"])],
    "an acquire beside the read is followed by the commit when both are there, read last":
        [(0, BESIDE, ["hold", "acquire", "read 0-32 last"]), (0, grant(), []),
         (0, READ, ["commit"])],
    "a read goes on while another reader has the lease and commits what that gave back":
        [BESIDE, (0, failed(BUSY), []), (0.1, READ, ["commit with blocks"])],
    "an acquire that was busy is sent again while the read lasts":
        [BESIDE, failed(BUSY), (0.25, DUE, ["acquire"])],
    "an acquire beside the read that is refused stops the read and drains":
        [BESIDE,
         (0, failed(ErrorCode.OFFER_COMPLETED), ["stop", "failed reading offer_completed drains"]),
         (0, READ, ["freed"])],
    "a commit that was busy is asked again after a moment until the deadline":
        [ALONE, READ, (0, failed(BUSY), []), (0.25, DUE, ["commit with blocks"]),
         (59.9, failed(BUSY)),
         (60, DUE, ["failed committing timeout"])],
    "a commit that is busy after the deadline is not sent again and was decided":
        [ALONE, READ, (60.5, failed(BUSY), ["failed committing timeout"])],
    "a commit that is refused late fails the fetch":
        [ALONE, READ, (5, DUE, []),
         (6, failed(ErrorCode.OFFER_EXPIRED), ["failed committing offer_expired ?"])],
    "an offer with other blocks than the ticket fails and gives the lease back":
        [BESIDE, (0, grant(32, after=8), ["stop", "failed reading geometry drains"]),
         (0, READ, ["release", "freed"])],
    "a lease granted to a fetch that drains goes back when it has drained":
        [BESIDE, CANCEL, (0, grant(), []), (0, READ, ["release", "freed"])],
    "an engine that has all tokens commits the offer without a read or a lease":
        [(0, known(speculative=SpeculativeRead(TABLES, acquires=True), first_token=32),
          ["hold", "commit with blocks"])],
    # whose turn it is
    "a fetch beyond the bound holds its peer and acquires nothing":
        [PLACE, known(), (0, known("f2"), ["hold f2"])],
    "the next begins in the event that ends one":
        [PLACE, known(), known("f2"), known("f3"), grant(), READ,
         (0.5, YES, ["completed", "acquire f2"])],
    "the next begins when one waits for tokens":
        [PLACE, known(), known("f2"), (0, grant(0), ["acquire f2"])],
    "blocks that drain keep nobody from beginning":
        [PLACE, known(), known("f2"), grant(),
         (0, CANCEL, ["ok", "stop", "cancelled reading cancelled drains", "acquire f2"])],
    "a fetch that stalls keeps its place for a bounded time":
        [PLACE, known(), known("f2"), (0.999, DUE, []), (1, DUE, ["acquire f2"])],
    "agents have turns and the fetches of one have them in order":
        [PLACE, *[known(f"a{n}") for n in range(4)],
         *[known(f"b{n}", boot="b") for n in range(2)], (1.001, DUE, ["acquire a1"]),
         (2.002, DUE, ["acquire b b0"]), (3.003, DUE, ["acquire a2"]),
         (4.004, DUE, ["acquire b b1"]), (5.005, DUE, ["acquire a3"])],
    "a queued fetch fails at its deadline and says where it was":
        [PLACE, known(), known("f2", timeout_s=0.5), (0.5, DUE, ["failed queued timeout f2"])],
    "a cancelled fetch does not wait any more":
        [PLACE, known(), known("f2"), known("f3"), ev.CancelRequested("f2", "c"),
         (0, CANCEL, ["ok", "cancelled acquiring cancelled", "acquire f3"])],
    "a new fetch that comes late does not have the turn of one that waits":
        [PLACE, known(), known("f2"), (1, known("f3"), ["hold f3", "acquire f2"]),
         (2, DUE, ["acquire f3"])],
    "the urgent one begins first of those that wait":
        [PLACE, known(), known("f2"), known("f3", priority=1), grant(), READ,
         (0, YES, ["completed", "acquire f3"])],

    # ranks at other agents
    "other agents are asked with the first grant and the offer is committed when all have ended":
        [requested(remote_ranks=OTHERS), READY, (0, grant(), ["ask others", "read 0-32 last"]),
         (0, READ, []), (0, OTHERS_DONE, ["commit"]), (0, YES, ["completed"])],
    "other agents that are faster are not waited for":
        [*SPREAD, (0, OTHERS_DONE, []), (0, READ, ["commit"])],
    "the lease is renewed while other agents read":
        [*WAITS, (3, DUE, ["renew"]), (3, grant(after=32, at=3.0), []), (6, DUE, ["renew"])],
    "what grows is read here while other agents read":
        [requested(remote_ranks=OTHERS), READY, (0, grant(0), ["ask others"]), (1, HINT, ["renew"]),
         (1, grant(32), ["read 0-32 last"]), (1, READ, []), (1, OTHERS_DONE, ["commit"])],
    "an engine is told of chunks when they are in the blocks of all ranks":
        [requested(remote_ranks=OTHERS, chunk_tokens=16), READY, grant(),
         (0, READ, ["read 16-32 last"]), (0, OTHERS_DONE, ["landed 16"]),
         (0, READ, ["commit", "landed 32"])],
    "a part that fails stops the others and the blocks come back with the last of them":
        [*SPREAD, (0, NO_PART, ["stop", "failed reading engine_lost drains"]),
         (0, READ, []), (0, OTHERS_DONE, ["release", "freed"])],
    "a part that fails when all is here stops the others":
        [*WAITS, (0, NO_PART, ["stop", "failed waiting engine_lost drains"]),
         (0, OTHERS_DONE, ["release", "freed"])],
    "a read that fails here stops the other agents":
        [*SPREAD, (0, NOT_READ, ["stop"]), (0, OTHERS_DONE, ["release", "end"])],
    "the next attempt starts when all parts have ended, and asks for them again":
        [*SPREAD, (0, GONE, ["stop"]), (0, READ, []), (0.1, OTHERS_DONE, ["release", "end"]),
         (0.1, DUE, ["resolve"]), (0.1, ready(attempt=2), ["acquire"]),
         (0.1, grant(attempt=2), ["ask others"]), (0.2, OTHERS_DONE, ["commit"])],
    "a part that fails for good ends an attempt that is already stopped":
        [*SPREAD, (0, GONE, ["stop"]), (0, NO_PART, ["failed reading engine_lost drains"])],

    # attempts
    "an agent that is gone is found again, and its next process is named":
        [*READING, (0, GONE, ["stop"]), (0.2, READ, ["release", "end"]), (0.2, DUE, ["resolve"]),
         (0.3, ready(boot="new", attempt=2), ["acquire new"]),
         (0.3, grant(attempt=2), ["commit new"]),
         (0.4, answered(COMMIT, Empty(), attempt=2), ["completed, 2 attempts"])],
    "tokens that landed are not read again":
        [requested(chunk_tokens=8), READY, grant(), READ, (0, NOT_READ, ["release", "end"]),
         (0, DUE, ["resolve"]), (0, ready(attempt=2), ["acquire"]),
         (0, grant(attempt=2), ["read 8-16"])],
    "tokens that only a ticket named are read again":
        [ALONE, READ, (0, failed(ErrorCode.DRAINING, refused=True), ["end"]), (0, DUE, ["resolve"]),
         (0, ready(attempt=2), ["acquire"]), (0, grant(attempt=2), ["read 0-32 last"])],
    "tokens of an offer whose memory at other agents has changed are read again":
        [requested(), ready(elsewhere=("m1",)), grant(16), READ, (0, GONE, ["release", "end"]),
         (0, DUE, ["resolve"]), ready(attempt=2, elsewhere=("m2",)),
         (0, grant(attempt=2), ["read 0-32 last"])],
    "tokens of an earlier data process are read again":
        [requested(), ready(nixl="A"), grant(16), read_from("A"), (0, GONE, ["release", "end"]),
         (0, DUE, ["resolve"]), ready(attempt=2, nixl="B"),
         (0, grant(attempt=2), ["read 0-32 last"]), (0, read_from("B"), ["commit of B"])],
    "tokens that another attempt read from the same data process, or mapped, are not":
        [requested(), ready(nixl="A"), grant(16), read_from("A"), (0, GONE, ["release", "end"]),
         (0, DUE, ["resolve"]), ready(attempt=2, nixl="A"),
         (0, grant(attempt=2), ["read 16-32 last"]), (0, READ, ["commit of A"])],
    "a commit of what an earlier data process sent is refused, and all is read again":
        [requested(), ready(nixl="A"), grant(), (0, read_from("A"), ["commit of A"]),
         (0, failed(STALE, refused=True), ["release", "end"]), (0, DUE, ["resolve"]),
         ready(attempt=2, nixl="B"), (0, grant(attempt=2), ["read 0-32 last"])],
    "a commit without an answer is repeated before anything is read from the next data process":
        [requested(), ready(nixl="A"), grant(), read_from("A"), (0, GONE, ["end"]),
         (0, DUE, ["hold", "commit with blocks of A"]),
         (0, failed(STALE, refused=True, attempt=2), ["end"]),
         (0.1, DUE, ["resolve"]),
         (0.1, ready(attempt=3, nixl="B"), ["commit with blocks of A"]),
         (0.1, failed(STALE, refused=True, attempt=3), ["end"]), (0.3, DUE, ["resolve"]),
         (0.3, ready(attempt=4, nixl="B"), ["acquire"]),
         (0.3, grant(attempt=4), ["read 0-32 last"])],
    "an offer may not shrink between two attempts":
        [requested(), READY, grant(16), READ, GONE, DUE, ready(attempt=2),
         (0, grant(8, attempt=2), ["release", "failed acquiring invalid, 2 attempts"])],
    "an answer to the attempt before changes nothing, but gives its lease back":
        [requested(), READY, (0, GONE, ["end"]), (0, DUE, ["resolve"]),
         (0, grant(), ["release"]), (0, ready(), []), (0, GONE, []),
         (0, ready(attempt=2), ["acquire"]), (0, failed(STALE), [])],
    "a lease granted during the pause goes back":
        [requested(), READY, GONE, DUE, ready(attempt=2), (0, step_failed(STALE, 2), ["end"]),
         (0.01, grant(attempt=2), ["release"])],
    "a lease granted to an attempt that drains goes back when it has drained":
        [BESIDE, (0, GONE, ["stop"]), (0, grant(), []), (0, READ, ["release", "end"])],
    "the pauses between attempts grow":
        [requested(), (0, GONE, ["end"]), (0, DUE, ["resolve"]),
         (0, step_failed(STALE, 2), ["end"]), (0.024, DUE, []), (0.05, DUE, ["resolve"]),
         (1, step_failed(STALE, 3), ["end"]), (1.049, DUE, []), (1.1, DUE, ["resolve"])],
    "an attempt that fails for good is the last":
        [requested(), GONE, DUE, (0, step_failed(EXPIRED, 2),
                                  ["failed resolving offer_expired, 2 attempts"])],
    "without time for another attempt a fetch fails with what went wrong":
        [requested(timeout_s=0.02), GONE, DUE,
         (0, step_failed(STALE, 2), ["failed resolving stale, 2 attempts"])],
    "a fetch that is cancelled in a pause ends at once":
        [requested(), GONE, DUE, step_failed(STALE, 2),
         (0.01, CANCEL, ["ok", "cancelled resolving cancelled, 2 attempts"])],
    "a fetch that is cancelled while an attempt ends drains":
        [*READING, GONE, (0, CANCEL, ["ok", "cancelled reading cancelled drains"]),
         (0, READ, ["release", "freed"])],
    "an attempt whose transfers never end is over at the deadline":
        [*READING, GONE, (60, DUE, ["failed reading timeout drains"]),
         (90, READ, ["release", "freed"])],
    "a rendezvous asks the next process again":
        [awaiting(), (0, failed(ErrorCode.PEER_LOST), ["end"]), (0, DUE, ["hold", "await_offer"]),
         (0, answered(MEET, TICKET, attempt=2), ["resolve"])],
    "a rendezvous that no engine can make fails at once":
        [awaiting(), (0, failed(ErrorCode.ENGINE_NOT_READY), ["failed awaiting engine_not_ready"])],
    "a commit that got no answer is repeated first, and shows the blocks":
        [*ASKED, (0, GONE, ["end"]), (0, DUE, ["hold", "commit with blocks"]),
         (0, answered(COMMIT, Empty(), attempt=2), ["completed, 2 attempts"])],
    "a commit that the next process does not know is repeated there":
        [*ASKED, GONE, DUE, (0, failed(STALE, refused=True, attempt=2), ["end"]),
         (0.05, DUE, ["resolve"]),
         (0.1, ready(boot="new", attempt=3), ["commit new with blocks"]),
         (0.1, answered(COMMIT, Empty(), attempt=3), ["completed, 3 attempts"])],
    "a commit whose end is unknown leaves it open when the offer is gone":
        [*ASKED, GONE, DUE, failed(STALE, refused=True, attempt=2), (0.05, DUE),
         (0.1, step_failed(ErrorCode.OFFER_UNKNOWN, 3),
          ["failed resolving offer_unknown ?, 3 attempts"])],
    "a commit under a lease that ended is repeated under another":
        [*ASKED, (0, failed(ErrorCode.LEASE_EXPIRED, refused=True), ["release", "end"]),
         (0, DUE, ["resolve"]), (0, ready(attempt=2), ["acquire"]),
         (0, grant(attempt=2), ["commit"])],
    "the parts of an engine that is gone are waited for":
        [*WAITS, (0, LOST, ["stop", "failed waiting engine_lost drains"]),
         (0, OTHERS_DONE, ["release", "freed"])],

    # a fetch that an earlier process of the agent had
    "a repeated fetch reads once it is known that the earlier process did not commit it":
        [(0, AGAIN, ["hold", "query"]), (0, DENIED, ["resolve"]), (0, READY, ["acquire"]),
         (0, grant(), ["read 0-32 last"]), (0, READ, ["commit"]), (0, YES, ["completed"])],
    "a repeated fetch that the earlier process has committed completes without a read":
        [AGAIN, (0, COMMITTED, ["completed"])],
    "a repeated fetch whose route is known begins after the answer":
        [(0, known(repeated=2), ["hold", "query"]), (0, DENIED, ["acquire"])],
    "a repeated rendezvous asks for its ticket after the answer":
        [(0, awaiting(repeated=1), ["hold", "query"]), (0, DENIED, ["await_offer"]),
         (0, MET, ["resolve"])],
    "a query is repeated until there is an answer, and leaves nothing open":
        [AGAIN, (0, answered(QUERY, RemoteError("no", code=ErrorCode.ENGINE_NOT_READY)), ["end"]),
         (0, DUE, ["hold", "query"]), (1, step_failed(ErrorCode.PEER_LOST, 2), ["end"]),
         (60, DUE, ["failed committing timeout, 2 attempts"])],
    "an attempt after the answer does not ask again":
        [AGAIN, DENIED, READY, (0, GONE, ["end"]), (0, DUE, ["resolve"])],
    "the parts of the earlier process end before anything else":
        [(0, SPREAD_AGAIN, ["hold", "end parts"]), (0, OTHERS_DONE, ["query"]),
         (0, COMMITTED, ["completed"])],
    "blocks drain while parts of the earlier process are in flight":
        [SPREAD_AGAIN, (0, CANCEL, ["ok", "stop", "cancelled committing cancelled drains"]),
         (0, OTHERS_DONE, ["freed"])],
    "an attempt that fails meanwhile waits for the parts of the earlier process":
        [SPREAD_AGAIN, (0, GONE, ["stop"]), (0, OTHERS_DONE, ["end"]),
         (0, DUE, ["hold", "query"])],

    # what comes late, or does not fit
    "a yes that was asked for by the deadline completes the fetch a little later":
        [requested(timeout_s=1.0), READY, grant(), (0.999, READ), (1.99, DUE, []),
         (1.99, YES, ["completed"])],
    **{f"a renewal that is answered during the commit does not disturb it, {number}":
        [*READING, HINT, READ, (0, late, []), (0, YES, ["completed"])]
        for number, late in enumerate(LATE)},
    **{f"{what} that no chunk can follow fails the fetch":
        [requested(), READY, grant(16), HINT,
         (0, grant(**news), ["stop", "failed reading invalid drains"]),
         requested("f2"), ready("f2"), grant(16, fetch_id="f2"), read(fetch_id="f2"),
         ev.OfferAdvanced("f2"),
         (0, grant(**news, fetch_id="f2"), ["release", "failed waiting invalid f2"])]
        for what, news in NEWS.items()},
    "a fetch too many is busy":
        [requested("f2"), requested("f3"), (0, requested(), ["busy"])],
    "a step that was cancelled on the way has failed, as only the engine cancels":
        [requested(), (0, failed(ErrorCode.CANCELLED), ["failed resolving cancelled"])],
    "an end that was cancelled on the way has failed as well":
        [*ASKED, (0, failed(ErrorCode.CANCELLED), ["release", "failed committing cancelled ?"])],
    # an engine that gives up for good
    **{f"who gives up for good in stage {number} has the offer withdrawn once":
        [*before, (0, GIVE_UP, ["ok", *words])]
        for number, (before, words) in enumerate([
            ([requested(), READY], ["cancelled acquiring cancelled", "withdraw"]),
            (READING, ["stop", "cancelled reading cancelled drains", "withdraw"]),
            ([requested(), failed(EXPIRED)], ["withdraw"]),
            ([requested(), READY, CANCEL], ["withdraw"]),
            ([*ASKED, YES], []),
        ])},
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_the_table_says_to_what_comes(script: list[Step]) -> None:
    play(*script)


SITUATIONS: dict[str, list[Step]] = {
    "awaiting": [awaiting()],
    "resolving": [requested()],
    "queued": [PLACE, known("f0"), known()],
    "acquiring": [known()],
    "waiting": WAITING,
    "reading": READING,
    "speculative": [BESIDE],
    "committing": ASKED,
    "spread": SPREAD,
    "for others": WAITS,
    "draining": [*READING, CANCEL],
    "completed": [*ASKED, YES],
    "repeated": [AGAIN],
    "repeated elsewhere": [SPREAD_AGAIN],
    "retrying": [*READING, GONE],
    "pausing": [requested(), GONE, DUE, step_failed(STALE, 2)],
    "failed": [requested(), failed(EXPIRED)],
}
ANYTHING: list[ev.Event] = [
    *(
        COMMITTED,
        DENIED,
        OTHERS_DONE,
        MET,
        READY,
        ev.TurnCame("f1"),
        grant(),
        failed(BUSY),
        failed(STALE),
    ),
    *(renew_failed(TIMEOUT), HINT, YES, CANCEL, GIVE_UP, GONE, LOST, STOPPED, DUE),
]
LAST: list[tuple[float, ev.Event]] = [
    (0.5, READ),
    (100.0, DUE),
    (100.0, READ),
    (100.0, OTHERS_DONE),
]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_any_event_in_any_state_ends_fetch_and_frees_blocks_once(
    situation: str,
) -> None:
    for first, second in product(ANYTHING, ANYTHING):
        table = play(*SITUATIONS[situation])
        words = [
            word
            for now, event in ((0.5, first), (0.5, second), *LAST)
            for word in said(tell(table, event, now))
            if word.startswith(("completed", "failed", "cancelled", "freed")) and " f0" not in word
        ]
        ended = situation in {"draining", "completed", "failed"}
        ends = [word for word in words if word != "freed"]
        assert len(ends) == (not ended)
        drains = situation == "draining" or any("drains" in word for word in ends)
        assert words.count("freed") == drains
        assert "f1" not in table.live


@pytest.mark.parametrize("end", [CANCEL, NO_PART, LOST, STOPPED, renew_failed(EXPIRED)])
def test_given_up_read_is_told_now_and_its_blocks_when_terminal(
    end: ev.Event,
) -> None:
    table = play(*READING)

    ended, drained = said(tell(table, end, 0.0)), said(tell(table, READ, 1.0))

    assert "stop" in ended
    assert ended[-1].endswith("drains")
    assert drained == ["release", "freed"]
    assert not table.live


@pytest.mark.parametrize(
    ("hint_s", "jitter", "due_at"),
    [
        (1.0, 0.0, 1.0),
        (1.0, 0.5, 1.5),
        (3600.0, 0.0, 2.0),
        (-1.0, 0.0, 0.001),
        (math.nan, 0, 0.001),
    ],
)
def test_busy_offer_is_acquired_again_at_hint_or_a_little_later(
    hint_s: float, jitter: float, due_at: float
) -> None:
    busy = failed(BUSY, jitter=jitter, retry_after_s=hint_s)

    assert play(requested(timeout_s=10.0), READY, busy).deadlines.next() == due_at


def test_answer_may_be_late_as_fetch_unless_agent_may_be_gone() -> None:
    for kind, steps, last, longest_s in (
        (AwaitOffer, [], awaiting(timeout_s=9.0), 10.0),
        (Acquire, [requested(timeout_s=9.0)], READY, 5.0),
        (Renew, [requested(timeout_s=9.0), READY, grant()], HINT, 10.0),
        (Commit, [requested(timeout_s=9.0), READY, grant()], READ, 10.0),
    ):
        asked = commands_of(kind, *steps, last=last)

        assert asked.timeout_s == pytest.approx(longest_s), kind
        assert not isinstance(asked.message, AwaitOffer) or asked.message.wait_s == 9.0


@pytest.mark.parametrize(("at_s", "timeout_s"), [(3.0, 7.0), (8.5, 1.5)])
def test_what_is_asked_last_has_until_the_end_of_the_grace(at_s: float, timeout_s: float) -> None:
    steps: list[Step] = [requested(timeout_s=9.0), READY, grant()]

    commit = commands_of(Commit, *steps, last=READ, now=at_s)

    assert commit.timeout_s == pytest.approx(timeout_s)


def test_requests_name_their_blocks_ticket_and_token() -> None:
    speculative = commands_of(ev.ReadChunk, last=ALONE)
    commit = commands_of(Commit, ALONE, last=READ)
    under_lease = commands_of(Commit, *READING, last=READ)
    first = commands_of(ev.ReadChunk, requested(), READY, last=grant(8))
    ready = replace(READY, nixl_agent="data 0")
    renew = commands_of(Renew, requested(), ready, grant(8), last=HINT)
    commit_from = commands_of(Commit, *READING, last=read_from("data 0"))
    acquire = commands_of(Acquire, awaiting(), MET, last=READY)
    release = commands_of(Release, requested(), READY, CANCEL, last=grant(epoch=4))

    assert speculative.tables == commit.message.tables == TABLES
    assert under_lease.message.tables is None, "what was read is what the lease named"
    assert (first.tables, renew.message.known_blocks) == (blocks(8), {"full": 1})
    assert renew.message.nixl_agent == commit_from.message.nixl_agent == "data 0"
    asked = acquire.message
    assert (asked.agent_boot, asked.offer_id) == (TICKET.agent_boot, TICKET.offer_id)
    assert asked.secret == TICKET.secret
    assert release == ev.NotifyAgent(
        TICKET, Release(**OF, epoch=4, token="token", code="cancelled")
    )


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

    report = commands_of(ev.ReportFetched, *steps, last=YES, now=4.0)
    waited: list[Step] = [PLACE, known(), known("f2"), (0.5, CANCEL), grant(fetch_id="f2")]
    queued = commands_of(ev.ReportFetched, *waited, last=ev.CancelRequested("f2", "c"), now=2.0)

    assert (report.fetched.num_bytes, report.fetched.path) == (500, "direct")
    assert (report.fetched.stages_s.waiting, report.fetched.stages_s.reading) == (0.75, 1.5)
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
    """A prefill agent that restarts and loses answers, and the blocks that are read from it.

    Each command is checked when it comes, and answered when the test says so. Bytes are right if
    they came out of the offer's own blocks, in the data process that the attempt knows.
    """

    def __init__(self, draw: st.DataObject, event: ev.Requested, num_ready: int) -> None:
        self.draw, self.now = draw, 0.0
        self.table = FetchTable(LIMITS)
        self.boot, self.data, self.epoch, self.num_ready = 0, 0, 0, num_ready
        self.leases: set[int] = set()
        self.granted_to: dict[int, int] = {}
        self.answered_boot: dict[int, str] = {}
        self.nixl = {1: "data 0"}
        """What each attempt reads from."""
        self.waiting: list[ev.Ask | ev.FindRoute] = []
        self.chunk: ev.ReadChunk | None = None
        self.right = [False] * 32
        self.attempt, self.num_ends, self.is_freed = 1, 0, False
        self.tell(event)

    def tell(self, event: ev.Event) -> None:
        for command in self.table.handle(event, self.now):
            self.check(command)

    def check(self, command: ev.Command) -> None:
        match command:
            case ev.AcquirePeer() | ev.Ask():
                assert self.chunk is None or command.attempt == self.attempt
                self.attempt = command.attempt
                if isinstance(command, ev.FindRoute | ev.Ask):
                    self.waiting.append(command)
                if isinstance(command, ev.Ask) and isinstance(command.message, Acquire | Renew):
                    known = self.answered_boot.get(command.attempt, "boot 0")
                    assert command.message.agent_boot == known
                if isinstance(command, ev.Ask) and isinstance(command.message, Renew):
                    assert self.granted_to[command.message.epoch] == self.attempt
            case ev.ReadChunk():
                assert self.chunk is None, "one chunk at a time"
                assert not command.epoch or self.granted_to[command.epoch] == self.attempt
                self.chunk = command
            case ev.EndAttempt():
                assert self.chunk is None
            case ev.ReportFetched(fetched=fetched):
                self.num_ends += 1
                assert not (fetched.blocks_free and self.chunk)
                self.is_freed |= fetched.blocks_free
                assert fetched.code or all(self.right), "completed with wrong bytes"
            case ev.NotifyEngine(message=BlocksFreed()):
                assert self.chunk is None
                assert not self.is_freed
                self.is_freed = True

    def code(self, *final: ErrorCode) -> ErrorCode:
        passing = [ErrorCode.PEER_LOST, STALE, ErrorCode.TRANSFER_FAILED, ErrorCode.DRAINING, BUSY]
        return self.draw.draw(st.sampled_from([*passing, *final]))

    def end_read(self) -> None:
        chunk = self.chunk
        assert chunk is not None
        self.chunk, error = None, None
        if self.draw.draw(st.booleans()):
            error = RemoteError("no", code=self.code())
        else:
            is_right = chunk.tables["full"].ids == blocks(chunk.stop)["full"].ids
            is_right &= self.nixl[self.attempt] == f"data {self.data}"
            self.right[chunk.start : chunk.stop] = [is_right] * (chunk.stop - chunk.start)
        nixl = self.nixl[self.attempt]
        self.tell(ev.ReadEnded("f1", 64, error, "direct", nixl_agent=nixl))

    def answer(self) -> None:
        command = self.waiting.pop(self.draw.draw(st.integers(0, len(self.waiting) - 1)))
        boot, is_lost = f"boot {self.boot}", self.draw.draw(st.booleans())
        if isinstance(command, ev.FindRoute):
            if is_lost:
                error = RemoteError("no", code=self.code())
                self.tell(ev.StepFailed("f1", command.attempt, error))
            else:
                self.answered_boot.setdefault(command.attempt, boot)
                nixl = self.nixl[command.attempt] = f"data {self.data}"
                self.tell(ev.PeerReady("f1", command.attempt, boot, nixl_agent=nixl))
            return
        outcome: Any = self.outcome(command.message, command.attempt)
        if is_lost:
            outcome = RemoteError("no", code=ErrorCode.PEER_LOST)
        self.tell(ev.Answered("f1", command.attempt, command.message, outcome, TICKET, self.now))

    def outcome(self, message: Any, attempt: int) -> Any:
        """What the process that is there now says."""
        nixl = message.nixl_agent if isinstance(message, Commit) else ""
        if message.agent_boot != f"boot {self.boot}" or nixl not in ("", f"data {self.data}"):
            return RequestRefused("another process", code=STALE)
        offered = blocks(self.num_ready)
        if isinstance(message, Commit):
            if message.tables is None and not self.leases:
                return RequestRefused("no lease", code=STALE)
            if self.num_ready < 32:
                return RequestRefused("open", code=ErrorCode.OFFER_OPEN)
            is_right = message.tables in (None, offered)
            return Empty() if is_right else RequestRefused("other", code=ErrorCode.GEOMETRY)
        if isinstance(message, Acquire):
            self.epoch += 1
            self.leases.add(self.epoch)
            known, epoch = 0, self.epoch
            self.granted_to[epoch] = attempt
        else:
            known, epoch = message.known_blocks.get("full", 0), message.epoch
        if epoch not in self.leases:
            return RequestRefused("no lease", code=ErrorCode.LEASE_EXPIRED)
        more = blocks(self.num_ready, known * 8)
        return Granted(epoch, 9.0, self.num_ready, self.num_ready == 32, more, "token")

    def restart_data(self) -> None:
        """READs of the attempt may end well, but with other bytes."""
        self.data += 1

    def restart(self) -> None:
        self.boot += 1
        self.leases.clear()
        if self.draw.draw(st.booleans()):
            self.tell(ev.StepFailed("f1", self.attempt, RemoteError("no", code=self.code())))

    def go_on(self) -> None:
        """One thing happens."""
        happens: list[Callable[[], Any]] = [
            self.restart,
            self.restart_data,
            lambda: self.pass_time(self.draw.draw(st.sampled_from([0.0, 0.06, 1.1, 4.0]))),
            lambda: setattr(self, "num_ready", min(32, self.num_ready + 8)),
            lambda: self.tell(HINT),
        ]
        if self.waiting:
            happens += [self.answer] * 4
        if self.chunk is not None:
            happens += [self.end_read] * 3
        self.draw.draw(st.sampled_from(happens))()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tell(DUE)


ALTERED = {"full": BlockTable.of([7, 101, 102, 103])}


@settings(max_examples=num_examples(1200), deadline=None)
@given(st.data())
def test_attempts_follow_each_other_and_keep_only_what_counts(data: st.DataObject) -> None:
    speculative = data.draw(
        st.sampled_from(
            [None, SpeculativeRead(TABLES, acquires=True), SpeculativeRead(ALTERED, acquires=False)]
        )
    )
    first = requested(chunk_tokens=data.draw(st.sampled_from([0, 8])), boot="boot 0")
    if speculative is not None:
        first = known(speculative=speculative, boot="boot 0", nixl_agent="data 0")
    peers = Peers(data, first, num_ready=8 if speculative is None else 32)
    for _ in range(data.draw(st.integers(0, 40))):
        peers.go_on()
    peers.pass_time(100.0)
    if peers.chunk is not None:
        peers.end_read()

    assert peers.num_ends == 1
    assert peers.is_freed
    assert not peers.table.live
