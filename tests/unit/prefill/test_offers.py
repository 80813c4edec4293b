"""The offer table: what it answers, whose lease it ends, and when it reports blocks released.

Each case is a script: events, with the time when it passes, and the answers; see `said`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace as altered

from kvbus import protocol
from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable, Tile
from kvbus.protocol import Outcome, Request
from kvbus.table.events import DeadlinePassed, DrainStarted, EngineLost, Refuse, SendReply, Stopped
from kvbus.table.table import KEPT_ANYWAY, KEPT_S
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferLimits
from kvbus_prefill.offer.table import OfferTable
from tests.unit.prefill.tickets import ticket_for

SECRET, TOKEN, NAME = "secret", "token", "name"
LIMITS = OfferLimits(max_offers=2, max_lease_s=4.0, max_hold_s=10.0, max_parts=2, max_denied=2)
COMPLETED, WITHDRAWN, EXPIRED = Outcome.COMPLETED, Outcome.WITHDRAWN, Outcome.EXPIRED
BUSY, STALE, FORBIDDEN = ErrorCode.BUSY, ErrorCode.STALE, ErrorCode.FORBIDDEN
OFFER_OPEN, LEASE_EXPIRED = ErrorCode.OFFER_OPEN, ErrorCode.LEASE_EXPIRED
DONE, GEOMETRY = ErrorCode.OFFER_COMPLETED, ErrorCode.GEOMETRY
OFFER_EXPIRED, OFFER_WITHDRAWN = ErrorCode.OFFER_EXPIRED, ErrorCode.OFFER_WITHDRAWN
PARKED = ErrorCode.OFFER_PARKED
OFFER_EXISTS, DRAINING = ErrorCode.OFFER_EXISTS, ErrorCode.DRAINING
OF: dict[str, Any] = {"agent_boot": "boot", "offer_id": "o1"}
Process = tuple[str, str]
NEXT: Process = ("decode-0", "second boot")
NO_PROCESS: Process = ("", "")
Asked = ev.RequestReceived[Any]


def opened(
    offer_id: str = "o1", *, request: str = "", ttl_s: float = 8.0, **changes: Any
) -> ev.Opened:
    """A sealed offer of 32 tokens, with 8 s to live."""
    fields = {"num_tokens": 32, "tables": {"full": BlockTable.of([3, 4])}, **changes}
    message = protocol.MakeOffer(request_id=request or f"request-{offer_id}", **fields)
    return ev.Opened(message, "open", ticket_for(message, offer_id, SECRET), ttl_s)


def asked(message: Request[Any], **more: str) -> Asked:
    """A request of a peer, or of the engine ``engine_id``."""
    return ev.RequestReceived(message=message, reply_to=message.op, **more)


def by_engine(message: Request[Any]) -> Asked:
    return asked(message, engine_id="engine")


def acquired(
    reader_id: str = "reader",
    *,
    token: str = TOKEN,
    holder: str = "",
    process: Process = NO_PROCESS,
    **changes: Any,
) -> Asked:
    fields = {"lease_s": 2.0, "secret": SECRET, **changes}
    agent_id, boot = process
    message = protocol.Acquire(
        **OF, reader_id=reader_id, reader_agent=agent_id, reader_boot=boot, **fields
    )
    return asked(message, holder=holder, fresh=token)


def renewed(
    epoch: int, *, lease_s: float = 2.0, known: int = 0, token: str = TOKEN, holder: str = ""
) -> Asked:
    known_blocks = {"full": known}
    message = protocol.Renew(
        **OF, epoch=epoch, lease_s=lease_s, token=token, known_blocks=known_blocks
    )
    return asked(message, holder=holder)


def returned(epoch: int = 1, token: str = TOKEN, holder: str = "") -> Asked:
    message = protocol.Release(**OF, epoch=epoch, token=token, code="cancelled")
    return asked(message, holder=holder)


def committed(
    reader_id: str = "reader",
    *,
    blocks: tuple[int, ...] | None = (3, 4),
    holder: str = "",
    process: Process = NO_PROCESS,
    **changes: Any,
) -> Asked:
    fields = {"num_tokens": 32, "engine_id": "engine", "secret": SECRET, "token": "own", **changes}
    agent_id, boot = process
    message = protocol.Commit(
        **OF,
        reader_id=reader_id,
        tables=None if blocks is None else {"full": BlockTable.of(blocks)},
        reader_agent=agent_id,
        reader_boot=boot,
        **fields,
    )
    return asked(message, holder=holder)


def held(reader_id: str = "reader", **more: Any) -> Asked:
    """A commit by a reader that has read under its lease."""
    return committed(reader_id, token=f"of {reader_id}", blocks=None, **more)


def of(offer_id: str, event: Asked) -> Asked:
    return altered(event, message=altered(event.message, offer_id=offer_id))


def more(num_tokens: int, first_block: int) -> Asked:
    tables = {"full": BlockTable.of([9], first_block=first_block)}
    return by_engine(protocol.ExtendOffer(offer_id="o1", num_tokens=num_tokens, tables=tables))


WITHDRAW = by_engine(protocol.WithdrawOffer(offer_id="o1"))
SEAL = by_engine(protocol.SealOffer(offer_id="o1"))
MORE, GAP = more(48, 2), more(64, 3)
PARK = by_engine(protocol.ParkOffer(offer_id="o1"))
POOLED = ev.Pooled("pool", "instance", {"full": BlockTable.of([8, 9])}, 64, "place")
COPIED = ev.Copied("o1", POOLED)
IN_POOL: dict[str, Any] = {"blocks": (8, 9), "engine_id": "pool"}
LOST, STOPPED, DUE = EngineLost("engine"), Stopped(), DeadlinePassed()
OPEN, SEALED = opened(sealed=False), opened()


@dataclass(frozen=True)
class Wanted:
    pack: protocol.Pack
    is_state: bool


def tile(
    blocks: tuple[int, ...] = (4,),
    first_block: int = 1,
    stop: int = 32,
    *,
    epoch: int = 1,
    token: str = TOKEN,
    engine_id: str = "engine",
    is_state: bool = False,
) -> Wanted:
    tile, table = (
        Tile("full", (0,), ("k",), 0, 1, 0, stop),
        BlockTable.of(blocks, first_block=first_block),
    )
    memory = {**OF, "engine_id": engine_id, "memory_id": "memory", "rank_secret": SECRET, "rank": 0}
    pack = protocol.Pack(
        **memory, epoch=epoch, tile=tile, table=table, slot_lease_s=1.0, token=token
    )
    return Wanted(pack, is_state)


def said(commands: list[ev.Command]) -> list[Any]:
    """A refusal is its code, a release its outcome; events that are published are left out."""
    words: list[Any] = []
    for command in commands:
        match command:
            case Refuse():
                words.append(command.error.code)
            case SendReply(_, protocol.CommitAnswer(is_so)):
                words.append(is_so)
            case SendReply():
                words.append("ok")
            case ev.BeginLease():
                words.append(f"begin {command.epoch}")
            case ev.EndLease():
                words.append(f"end {command.epoch} {command.code}")
            case ev.ReportReleased():
                words.append(command.released.outcome)
            case ev.ReportParked():
                words.append("parked")
            case ev.FreePooled():
                words.append("freed")
            case ev.ParkSoon():
                words.append("park")
    return words


def answer(table: OfferTable, one: ev.Event | Wanted, now: float) -> list[Any]:
    """The answers to an event, or to a request for a tile, which changes nothing."""
    if not isinstance(one, Wanted):
        return said(table.handle(one, now))
    before = table.num_leases, table.deadlines.next()
    try:
        table.check_pack(one.pack, now, is_state=one.is_state)
    except KVBusError as error:
        return [error.code]
    finally:
        assert (table.num_leases, table.deadlines.next()) == before
    return ["may be packed"]


What = ev.Event | Wanted
Step = What | tuple[What, list[Any]] | tuple[float, What] | tuple[float, What, list[Any]]


def play(*steps: Step) -> OfferTable:
    """Handle each event; it comes when the one before did, unless it has a time."""
    table, now = OfferTable(LIMITS), 0.0
    for step in steps:
        parts: list[Any] = [*step] if isinstance(step, tuple) else [step]
        now = parts.pop(0) if isinstance(parts[0], int | float) else now
        one, *expected = parts
        words = answer(table, one, now)
        assert expected in ([], [words]), (now, one)
    return table


def led(agent_id: str, boot: str = "first boot", name: str = "before", **more: Any) -> Asked:
    return acquired(name, process=(agent_id, boot), **more)


BEFORE_ALL = opened(tables={"full": BlockTable.of([3, 4], first_block=2)}, num_tokens=64)
STATE = tile((3,), 0, stop=1, is_state=True)
PACKED, COMMIT_ENDS = ["may be packed"], ["ok", "end 1 offer_completed", COMPLETED]
TWICE = opened("o2", request="request-o1")
AGAIN = opened(left_s=0.5)  # an offer of an earlier process of the agent, with 0.5 s to live


def before(*tokens: str, transfer_id: str | None = None) -> ev.Restored:
    """An offer that these tokens have committed at an earlier process of the agent."""
    marks = tuple(protocol.commit_mark(SECRET, token) for token in tokens)
    ended = protocol.EndedOffer("o1", "request-o1", SECRET, marks, transfer_id)
    return ev.Restored("engine", ended)


def query(token: str = "own", secret: str = SECRET, **named: str) -> Asked:
    """Whether the offer was committed with this token, by the later process of the reader."""
    return asked(protocol.CommitQuery(secret, token, NEXT[1], **{"offer_id": "o1", **named}))


# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    # commits under a lease
    "a commit under a lease whose reply was lost is answered ok again and reports nothing": [SEALED,
        acquired(), held(), (1, held(), ["ok"])],
    "a commit under a lease before the seal is refused and the lease goes on": [OPEN, acquired(),
        (1, held(), [OFFER_OPEN]), SEAL, (held(), COMMIT_ENDS)],
    "a commit at the end of the lease is late without a timer": [SEALED, acquired(lease_s=2.0),
        (2, held(), ["end 1 lease_expired", LEASE_EXPIRED])],
    "a commit under a lease that was given back is stale": [SEALED, acquired(), returned(),
        (1, held(), [STALE])],
    "a reader that has no lease says what it has read": [SEALED, (1, held(), [STALE]),
        (committed(), ["ok", COMPLETED])],
    "a reader that lost its lease may say what it has read": [SEALED, acquired(lease_s=2.0),
        (2, held()), (committed(), ["ok", COMPLETED])],
    # commits
    "a second commit by another token or key gets offer_completed": [SEALED, committed(),
        (1, committed(token="another"), [DONE]), (committed(holder="other"), [DONE])],
    "a commit with the token of the last lease gets offer_withdrawn": [SEALED, acquired(), WITHDRAW,
        (1, committed(token=TOKEN), [OFFER_WITHDRAWN])],
    "a commit by another token than under the lease is no repeated one": [SEALED, acquired(),
        held(), (1, committed(), [DONE])],
    "a commit while another reader has the lease is busy until that gave it back": [SEALED,
        acquired("another"), (1, committed(), [BUSY]), returned(),
        (committed(), ["ok", COMPLETED])],
    "a commit by who has the lease ends it before the blocks are reported released": [SEALED,
        acquired(), (1, committed(), COMMIT_ENDS)],
    "a commit with the reader's name and another key does not end its lease": [SEALED, acquired(),
        (1, committed(holder="other"), [BUSY]), (held(), COMMIT_ENDS)],
    "a commit when the offer expires is late without a timer": [opened(ttl_s=1.0),
        (1, committed(), [EXPIRED, OFFER_EXPIRED])],
    # how long an offer and a lease last
    "an open offer outlives its ttl while a reader asks to commit it": [OPEN,
        *[(now, committed(), [OFFER_OPEN]) for now in (7, 10, 13)], (14, SEAL),
        (14.1, committed(), ["ok", COMPLETED])],
    "a reader that asks no more keeps an open offer for a lease and no longer": [OPEN,
        (7, committed()), (7 + LIMITS.max_lease_s - 0.1, DUE, []),
        (7 + LIMITS.max_lease_s, DUE, [EXPIRED])],
    "readers that ask for ever keep an open offer as long as one may hold it": [OPEN,
        *[(7 + n, committed(f"reader-{n}"), [OFFER_OPEN]) for n in range(int(LIMITS.max_hold_s))],
        (7 + LIMITS.max_hold_s, committed(), [EXPIRED, OFFER_EXPIRED])],
    "who has not the secret does not keep an open offer": [OPEN,
        (7, committed(secret="another"), [FORBIDDEN]), (8, DUE, [EXPIRED])],
    "a lost engine ends an open offer that a reader asks to commit": [OPEN, (7, committed()),
        (9, LOST, [WITHDRAWN])],
    "a reader whose lease ended before its offer gets lease_expired": [opened(ttl_s=1.0),
        acquired(lease_s=2.0), (3, DUE), (renewed(1), [LEASE_EXPIRED]),
        (acquired(), [OFFER_EXPIRED])],
    "no renewal moves the end of a lease past the longest hold": [SEALED, acquired(lease_s=4.0),
        *[(now, renewed(1, lease_s=4.0), ["ok"]) for now in (3, 6, 9)],
        (10, DUE, ["end 1 lease_expired", EXPIRED])],
    "a reader that acquires again and again holds no longer than one that renews": [
        opened(ttl_s=1.0), acquired(lease_s=4.0),
        *[(now, acquired(lease_s=4.0)) for now in (3, 6, 9)],
        (10, DUE, ["end 4 lease_expired", EXPIRED])],
    # parked offers
    "an offer that is copied is parked and read from the pool": [SEALED, (1, COPIED, ["parked"]),
        (acquired(engine_id="pool"), ["ok", "begin 1"]),
        (held(), ["ok", "end 1 offer_completed", "freed", COMPLETED])],
    "what was read out of the engine before it was parked is nothing": [SEALED, COPIED,
        (1, committed(), [PARKED]), (acquired(), [PARKED]),
        (acquired(engine_id="engine"), [PARKED]),
        (committed(**{**IN_POOL, "blocks": (3, 4)}), [GEOMETRY]),
        (committed(**IN_POOL), ["ok", "freed", COMPLETED])],
    "who has not the secret does not hear where it is": [SEALED, COPIED,
        (1, committed(secret="another"), [FORBIDDEN]), (acquired(secret="another"), [FORBIDDEN])],
    "an offer that is read is not parked": [SEALED, acquired(), (1, COPIED, ["freed"]),
        (held(), COMMIT_ENDS)],
    "an offer that one of its readers has is not parked": [opened(readers=2), committed("a"),
        (1, COPIED, ["freed"]), (committed("b", token="b"), ["ok", COMPLETED])],
    "an open offer is not parked": [OPEN, (1, COPIED, ["freed"]), SEAL,
        (committed(), ["ok", COMPLETED])],
    "an offer that ended while it was copied is not parked": [SEALED, WITHDRAW,
        (1, COPIED, ["freed"]), (2, ev.Copied("o9", POOLED), ["freed"])],
    "an offer whose lease was given back is parked": [SEALED, acquired(), returned(),
        (1, COPIED, ["parked"])],
    "a parked offer outlives its engine and not its pool": [SEALED, COPIED, (1, LOST, []),
        (renewed(1), [STALE]), (EngineLost("pool"), ["freed", WITHDRAWN])],
    "a parked offer expires as any does": [SEALED, COPIED, (7.9, DUE, []),
        (8, DUE, ["freed", EXPIRED])],
    "a parked offer is withdrawn and its lease revoked": [SEALED, COPIED,
        acquired(engine_id="pool"),
        (1, WITHDRAW, ["ok", "end 1 offer_withdrawn", "freed", WITHDRAWN])],
    "an agent that stops frees the pool and reports no end": [SEALED, COPIED,
        (1, STOPPED, ["freed"])],
    "a parked offer counts and its request may be offered again": [SEALED, COPIED, (TWICE, ["ok"]),
        (opened("o3"), [BUSY])],
    "an engine that did not hear that its offer is parked hears it again": [SEALED, COPIED,
        (1, AGAIN, ["ok", "parked"]), committed(**IN_POOL), (AGAIN, ["ok", COMPLETED])],
    "a tile is packed out of the blocks in the pool": [SEALED, COPIED, acquired(engine_id="pool"),
        (1, tile((9,), engine_id="pool"), PACKED), (tile((4,), engine_id="pool"), [GEOMETRY]),
        (tile((9,)), [FORBIDDEN])],
    "an engine may ask early or late to park": [OPEN, (PARK, ["ok", "park"]), SEAL,
        (PARK, ["ok", "park"]), COPIED, (PARK, ["ok"]), WITHDRAW, (PARK, ["ok"])],
    # a restart of the agent
    "an offer that is published again waits for a reader though its time is over": [AGAIN,
        (LIMITS.reader_return_s - 0.1, DUE, []), (LIMITS.reader_return_s, DUE, [EXPIRED])],
    "an offer that is published again takes the place of another one if need be": [opened("o2"),
        opened("o3"), (AGAIN, ["ok"])],
    "an offer that is sent again is the same one": [SEALED, acquired(), (1, SEALED, ["ok"]),
        (held(), COMMIT_ENDS)],
    "an offer that has ended is reported again when it is sent again": [SEALED, committed(),
        (1, AGAIN, ["ok", COMPLETED]), (committed(), ["ok"])],
    "an offer outlives the end of its engine's connection and the end of its agent": [SEALED,
        acquired(), (1, LOST, ["end 1 engine_lost", WITHDRAWN]), (2, AGAIN, ["ok"]),
        (3, committed(), ["ok", COMPLETED])],
    "the id of an offer is not that of another one": [SEALED,
        (1, opened(request="another"), [OFFER_EXISTS]), WITHDRAW,
        (opened(request="another"), [OFFER_EXISTS])],
    "a commit whose reply was lost with the agent is answered by the next one": [before("own"),
        (1, committed(), ["ok"]), (committed(token="another"), [DONE]), (acquired(), [DONE])],
    "what this agent has completed itself it does not enter again": [SEALED, committed(),
        before("own", "another"), (1, committed(token="another"), [DONE])],
    "an offer that was committed before is not there for who awaits it": [
        asked(protocol.AwaitOffer(NAME, 1.0)), (before("own", transfer_id=NAME), [DONE])],
    # whether an earlier process of the reader has committed
    "a commit is known by its token and the secret": [SEALED, committed(), (1, query(), [True]),
        (query(token="other"), [False]), (query(secret="wrong"), [FORBIDDEN])],
    "so it is at the next agent": [before("own"), (1, query(), [True]),
        (query(token="other"), [False])],
    "of a rendezvous it is known by its name": [before("own", transfer_id=NAME),
        (1, query(secret=NAME, offer_id=""), [True])],
    "after a no only the later process of the reader commits with the token": [SEALED,
        (1, query(), [False]), (2, committed(process=("decode-0", "first boot")), [STALE]),
        (3, committed(token="another's", process=("decode-1", "boot"), blocks=None), [STALE]),
        (committed(process=NEXT), ["ok", COMPLETED])],
    "so many tokens may be denied, and no more": [SEALED, (1, query(token="0"), [False]),
        (query(token="1"), [False]), (2, query(token="one more"), [BUSY]),
        (query(token="0"), [False])],
    # who may read, and who must wait
    "one offer more than the limit is busy": [opened("o1"), opened("o2"), (opened("o3"), [BUSY])],
    "a request is not offered twice until its first offer is released": [SEALED,
        (TWICE, [OFFER_EXISTS]), WITHDRAW, (TWICE, ["ok"])],
    "an agent that drains accepts no new offers and finishes the old ones": [SEALED, acquired(),
        DrainStarted(), (1, opened("o2"), [DRAINING]), (held(), COMMIT_ENDS)],
    # a reader at several agents
    "a part has a lease beside its reader and its commit does not end the offer": [SEALED,
        acquired(), (acquired("part", part=True), ["ok", "begin 2"]),
        (1, held("part", part=True), ["ok", "end 2 offer_completed"]), (held(), COMMIT_ENDS)],
    "a part takes no place of a reader": [SEALED, acquired("part", part=True),
        (acquired(), ["ok", "begin 2"]), (acquired("another"), [BUSY])],
    "a commit of a part whose reply was lost is answered ok again": [SEALED, acquired(),
        acquired("part", part=True), held("part", part=True), (1, held("part", part=True), ["ok"])],
    "an offer is not over while a part has a lease though its reader is gone": [opened(ttl_s=1.0),
        acquired(), acquired("part", part=True), returned(), (1.5, DUE, []),
        (2, DUE, ["end 2 lease_expired", EXPIRED])],
    "a part that was read without a lease says what it has read and ends nothing": [SEALED,
        (committed("part", token="its own", part=True), ["ok"]),
        (1, committed(), ["ok", COMPLETED])],
    "parts that are live or done are as many as may be": [SEALED, acquired("one", part=True),
        held("one", part=True), acquired("two", part=True), (acquired("three", part=True), [BUSY]),
        (acquired("two", part=True), ["end 3 stale", "ok", "begin 4"])],
    # several readers
    "as many readers as may have a lease at once and the next waits": [opened(readers=2),
        acquired("a", token="a"), acquired("b", token="b"), (1, acquired("c", token="c"), [BUSY]),
        (returned(1, "a"), ["ok", "end 1 stale"]), (acquired("c", token="c"), ["ok", "begin 3"])],
    "the blocks are released when the last reader has everything": [opened(readers=3),
        acquired("a", token="a"), acquired("b", token="b"),
        (1, held("b"), ["ok", "end 2 offer_completed"]), (committed("c"), ["ok"]),
        (held("a"), COMMIT_ENDS)],
    "who comes when all others have read is the last one": [opened(readers=2), committed("a"),
        acquired("b", token="b"), (1, committed("c", token="other"), [BUSY]),
        (held("b"), ["ok", "end 2 offer_completed", COMPLETED]), (acquired("c"), [DONE])],
    "a yes whose reply was lost is said again and counts once": [opened(readers=3),
        acquired("a", token="a"), held("a"), committed("b"), (1, held("a"), ["ok"]),
        (committed("b"), ["ok"]), (committed("c", token="other"), ["ok", COMPLETED]),
        (held("a"), ["ok"]), (committed("b"), ["ok"])],
    "a yes is said again after any number of readers that gave up": [opened(readers=2),
        acquired("a", token="a"), held("a"),
        *[step for n in range(3, 13) for step in (acquired(f"{n}", token="b"), returned(n, "b"))],
        (1, held("a"), ["ok"])],
    "a reader that is late does not disturb another": [opened(readers=2), acquired("a", token="a"),
        acquired("b", token="b"), (1, renewed(2, lease_s=4.0, token="b"), ["ok"]),
        (3, held("a"), ["end 1 lease_expired", LEASE_EXPIRED]),
        (held("b"), ["ok", "end 2 offer_completed"])],
    "the token of one reader is not the right of another": [opened(readers=2),
        acquired("a", token="a"), acquired("b", token="b"), (1, renewed(2, token="a"), [FORBIDDEN]),
        (renewed(1), [FORBIDDEN])],
    "a withdrawn offer revokes every lease before it is reported released": [
        opened(readers=2, sealed=False), acquired("a", token="a"), acquired("b", token="b"),
        (1, WITHDRAW, ["ok", "end 1 offer_withdrawn", "end 2 offer_withdrawn", WITHDRAWN]),
        (held("a"), [OFFER_WITHDRAWN]), (held("b"), [OFFER_WITHDRAWN])],
    "an offer that fewer have read than may is completed by its time to live": [opened(readers=2),
        acquired("a", token="a"), held("a"), (8, DUE, [COMPLETED]),
        (acquired("b"), [OFFER_EXPIRED])],
    "a lease of any reader outlasts the time to live": [opened(readers=2, ttl_s=1.0), acquired("a"),
        (0.5, acquired("b", lease_s=4.0)), (2, DUE, ["end 1 lease_expired"]),
        (4.5, DUE, ["end 2 lease_expired", EXPIRED])],
    # the next process of a reader
    "the next process of a reader has what the one before had at once": [SEALED, led("decode-0"),
        (1, acquired("after", process=NEXT), ["end 1 stale", "ok", "begin 2"]),
        (held("before"), [STALE])],
    "the next process of a reader commits what the one before had at once": [SEALED,
        led("decode-0"), (1, committed("after", process=NEXT), COMMIT_ENDS)],
    "the next process of a reader ends all leases of the one before": [opened(readers=2),
        *[led("decode-0", name=name, token=name) for name in "ab"],
        (1, acquired("after", process=NEXT), ["end 1 stale", "end 2 stale", "ok", "begin 3"])],
    "the process of another agent has to wait": [SEALED, led("decode-1"),
        (1, acquired("after", process=NEXT), [BUSY])],
    "another reader in the same process has to wait": [SEALED, led("decode-0", NEXT[1]),
        (1, acquired("after", process=NEXT), [BUSY])],
    "the next process with another key has to wait": [SEALED, led("decode-0"),
        (1, acquired("after", process=NEXT, holder="other"), [BUSY]),
        (committed("after", process=NEXT, holder="other"), [BUSY])],
    "a process without a name is the next of none": [SEALED, led(""),
        (1, led("", "second boot", "after"), [BUSY])],
    # the blocks
    "what was read out of other blocks than those of the offer is nothing": [SEALED,
        (1, committed(blocks=(3, 5)), [GEOMETRY]), (committed(), ["ok", COMPLETED])],
    "nor is what a ticket named that had other tokens or another engine": [SEALED,
        (1, committed(num_tokens=33), [GEOMETRY]), (committed(num_tokens=17), [GEOMETRY]),
        (committed(engine_id="other"), [GEOMETRY]), (committed(), ["ok", COMPLETED])],
    "a tile is packed while its lease lives": [SEALED, acquired(), (1.999, tile(), PACKED),
        (2, tile(), [LEASE_EXPIRED])],
    "a tile is packed out of the blocks of the offer": [SEALED, acquired(),
        (1, tile((3,)), [GEOMETRY]), (tile((4, 5)), [GEOMETRY]),
        (tile((3, 4), 0, stop=33), [GEOMETRY]), (tile((3, 4), 0), PACKED)],
    "a tile is packed out of no block before those of the offer": [BEFORE_ALL, acquired(),
        (1, tile((3,), 0, stop=16), [GEOMETRY])],
    "a tile is packed for who has the lease": [SEALED, acquired(), (1, tile(epoch=2), [STALE]),
        (tile(token="wrong"), [FORBIDDEN])],
    "a tile is not packed after the end of its offer": [SEALED, acquired(), WITHDRAW,
        (1, tile(), [OFFER_WITHDRAWN]), (tile(epoch=2), [STALE])],
    "a state is packed once its offer is sealed": [OPEN, acquired(), (1, STATE, [OFFER_OPEN]), SEAL,
        (STATE, PACKED)],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_the_table_says_to_what_comes(script: list[Step]) -> None:
    play(*script)


SITUATIONS: dict[str, list[Step]] = {
    "open": [OPEN],
    "sealed": [SEALED],
    "leased": [SEALED, acquired()],
    "leased and open": [OPEN, acquired()],
    "released": [SEALED, acquired(), WITHDRAW],
    "parked": [SEALED, COPIED],
    "parked and leased": [SEALED, COPIED, acquired(engine_id="pool")],
}
ANYTHING = [
    MORE,
    GAP,
    SEAL,
    PARK,
    WITHDRAW,
    acquired(),
    renewed(1),
    held(),
    committed(),
    returned(),
]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_state_answers_each_request_once_and_end_is_final(situation: str) -> None:
    for first, second in product([*ANYTHING, LOST, STOPPED, DUE], ANYTHING):
        table = play(*SITUATIONS[situation])
        all_said = [said(table.handle(event, 1.0)) for event in (first, second)]
        for event, words in zip((first, second), all_said, strict=True):
            answers = [one for one in words if one == "ok" or isinstance(one, ErrorCode)]
            assert len(answers) == (event in ANYTHING)
        releases = [one for words in all_said for one in words if isinstance(one, Outcome)]
        assert len(releases) <= (situation != "released")
        is_live = not releases and situation != "released" and first is not STOPPED
        assert ("o1" in table.live) == is_live


LATE: dict[str, Callable[[int], ev.Event]] = {"renew": renewed, "return": returned}
ENDS: dict[ErrorCode, ev.Event] = {
    OFFER_WITHDRAWN: WITHDRAW,
    ErrorCode.ENGINE_LOST: LOST,
    DRAINING: STOPPED,
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_late_reader_is_told_stale_and_changes_nothing(late: Callable[[int], ev.Event]) -> None:
    for made in (SEALED, OPEN):
        table = play(made, acquired(), acquired(), (1, late(1), [STALE]), (1, tile(), [STALE]))
        assert (table.num_leases, table.deadlines.next()) == (1, 2.0)
    for code, end in ENDS.items():
        steps = [(1, one, [code]) for one in (late(1), acquired(), committed(), tile())]
        play(SEALED, acquired(), end, *steps)


def granted(commands: list[ev.Command]) -> protocol.Granted:
    (body,) = (one.body for one in commands if isinstance(one, SendReply))
    assert isinstance(body, protocol.Granted)
    return body


WRONG_RIGHTS = {
    "acquire": acquired(secret="wrong", token="new"),
    "commit": committed(secret="wrong"),
    "commit under a lease": held(secret="wrong"),
    "withdraw": asked(protocol.PeerWithdraw(**OF, secret="wrong")),
    "renew": renewed(1, token="wrong"),
    "return": returned(1, "wrong"),
    "an empty token": renewed(1, token=""),
    "renew by another key": renewed(1, holder="other"),
    "return by another key": returned(holder="other"),
    "no ascii": renewed(1, token="t\u00f6ken"),
}


@pytest.mark.parametrize("wrong", WRONG_RIGHTS.values(), ids=WRONG_RIGHTS)
@pytest.mark.parametrize("situation", ["leased", "leased and open"])
def test_wrong_right_is_refused_without_detail_or_change(wrong: ev.Event, situation: str) -> None:
    table = play(*SITUATIONS[situation])
    (refusal,) = table.handle(wrong, 1.0)
    assert isinstance(refusal, Refuse)
    assert (refusal.error.code, refusal.error.detail) == (FORBIDDEN, {})
    assert (table.num_leases, table.deadlines.next()) == (1, 2.0)
    assert granted(table.handle(renewed(1), 1.0)).num_tokens == 32
    ended = play(SEALED, acquired(), WITHDRAW)
    assert said(ended.handle(wrong, 1.0)) == [FORBIDDEN], "it tells nobody how it ended, either"


def test_another_reader_is_told_busy_and_when_to_come_again() -> None:
    table = play(SEALED, acquired("first", lease_s=2.0))
    for now, pause_s in (0.5, 0.25), (1.875, 0.125):
        for event in acquired("second"), committed("second"):
            (refusal,) = table.handle(event, now)
            assert isinstance(refusal, Refuse)
            assert refusal.error.code is BUSY
            assert refusal.error.detail == {"retry_after_s": pause_s}


def test_renewal_brings_unknown_blocks_and_none_behind_gap() -> None:
    table = play(OPEN, acquired(), (0, GAP, [GEOMETRY]))
    before = granted(table.handle(renewed(1, known=2), 0.5))
    table.handle(MORE, 0.5)
    after = granted(table.handle(renewed(1, known=2), 1.0))
    assert (before.num_tokens, len(before.tables.get("full", ()))) == (32, 0)
    assert (after.num_tokens, after.tables) == (48, MORE.message.tables)


def hand_over(table: OfferTable, offer_id: str, now: float) -> None:
    for event in (opened(offer_id), of(offer_id, acquired()), of(offer_id, held())):
        table.handle(event, now)


def test_grant_has_number_of_last_gpu_work_of_one_stream() -> None:
    table = play(opened(sealed=False, after=512))
    assert granted(table.handle(acquired(), 0.0)).after == 512
    for late in (MORE, SEAL):
        other = altered(late, message=altered(late.message, after=1025))
        (refused,) = table.handle(other, 0.0)
        assert isinstance(refused, Refuse)
        assert "of one stream" in refused.error.message
        assert granted(table.handle(renewed(1), 0.0)).after == 512
    table.handle(altered(MORE, message=altered(MORE.message, after=1536)), 0.0)
    assert granted(table.handle(renewed(1), 0.0)).after == 1536
    table.handle(altered(SEAL, message=altered(SEAL.message, after=1024)), 0.0)
    assert granted(table.handle(renewed(1), 0.0)).after == 1536


def test_ended_offers_are_known_for_minute_and_last_ones_longer() -> None:
    table, num_known = OfferTable(), []
    for number in range(3000):
        hand_over(table, f"o{number}", number / 20)
        num_known.append(len(table.retired))
    repeated = of("o1800", held())  # a minute ago
    again = said(table.handle(repeated, 3000 / 20))
    for number in range(1300):
        hand_over(table, f"slow-{number}", 400.0 + number)
    assert max(num_known) == num_known[-1] == 20 * KEPT_S + 1
    assert again == ["ok"]
    assert len(table.retired) == KEPT_ANYWAY


def test_knowledge_of_ended_offers_is_bounded_by_bytes() -> None:
    table = OfferTable(OfferLimits(max_retired_bytes=50_000))
    for number in range(100):
        hand_over(table, f"o{number}", 1.0)
        assert table.retired_bytes <= 50_000
    kept = list(table.retired)
    assert kept == [f"o{number}" for number in range(100 - len(kept), 100)]
    assert 10 < len(kept) < 50
