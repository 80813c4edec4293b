"""The offer table: what it answers, whose lease it ends, and when it reports blocks released.

Each case is a script: events, some with the time and what must be said to them. See `said`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace as altered

from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable, Tile
from kvbus.protocol import (
    Acquire,
    AwaitOffer,
    Commit,
    CommitAnswer,
    CommitQuery,
    EndedOffer,
    ExtendOffer,
    Granted,
    MakeOffer,
    Outcome,
    Pack,
    PeerWithdraw,
    Release,
    Renew,
    Request,
    SealOffer,
    WithdrawOffer,
    commit_mark,
)
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
)
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


def opened(
    offer_id: str = "o1", *, request: str = "", ttl_s: float = 8.0, **changes: Any
) -> ev.Opened:
    """A sealed offer of 32 tokens, with 8 s to live."""
    fields = {"num_tokens": 32, "tables": {"full": BlockTable.of([3, 4])}, **changes}
    message = MakeOffer(request_id=request or f"request-{offer_id}", **fields)
    return ev.Opened(message, "open", ticket_for(message, offer_id, SECRET), ttl_s)


def asked(message: Request[Any], *, holder: str = "", fresh: str = "") -> ev.Asked[Any]:
    """By a peer."""
    return ev.Asked(message=message, reply_to=message.op, holder=holder, fresh=fresh)


def by_engine(message: Request[Any]) -> ev.Asked[Any]:
    return ev.Asked(message=message, reply_to=message.op, engine_id="engine")


OF: dict[str, Any] = {"agent_boot": "boot", "offer_id": "o1"}
Process = tuple[str, str]


def acquired(
    reader_id: str = "reader",
    *,
    lease_s: float = 2.0,
    token: str = TOKEN,
    secret: str = SECRET,
    holder: str = "",
    process: Process = ("", ""),
    part: bool = False,
) -> ev.Asked[Any]:
    agent_id, boot = process
    message = Acquire(
        **OF,
        reader_id=reader_id,
        lease_s=lease_s,
        secret=secret,
        reader_agent=agent_id,
        reader_boot=boot,
        part=part,
    )
    return asked(message, holder=holder, fresh=token)


def renewed(
    epoch: int, *, lease_s: float = 2.0, known: int = 0, token: str = TOKEN, holder: str = ""
) -> ev.Asked[Any]:
    known_blocks = {"full": known}
    message = Renew(**OF, epoch=epoch, lease_s=lease_s, token=token, known_blocks=known_blocks)
    return asked(message, holder=holder)


def returned(epoch: int = 1, token: str = TOKEN, holder: str = "") -> ev.Asked[Any]:
    return asked(Release(**OF, epoch=epoch, token=token, code="cancelled"), holder=holder)


def taken(
    reader_id: str = "reader",
    *,
    token: str = "own",
    blocks: tuple[int, ...] | None = (3, 4),
    num_tokens: int = 32,
    engine_id: str = "engine",
    secret: str = SECRET,
    holder: str = "",
    process: Process = ("", ""),
    part: bool = False,
) -> ev.Asked[Any]:
    """By a reader that says which blocks it has read."""
    agent_id, boot = process
    message = Commit(
        **OF,
        reader_id=reader_id,
        secret=secret,
        token=token,
        tables=None if blocks is None else {"full": BlockTable.of(blocks)},
        num_tokens=num_tokens,
        engine_id=engine_id,
        reader_agent=agent_id,
        reader_boot=boot,
        part=part,
    )
    return asked(message, holder=holder)


def held(reader_id: str = "reader", **more: Any) -> ev.Asked[Any]:
    """By a reader that has read under its lease."""
    return taken(reader_id, token=f"of {reader_id}", blocks=None, **more)


def of(offer_id: str, event: ev.Asked[Any]) -> ev.Asked[Any]:
    return altered(event, message=altered(event.message, offer_id=offer_id))


def more(num_tokens: int, first_block: int) -> ev.Asked[Any]:
    tables = {"full": BlockTable.of([9], first_block=first_block)}
    return by_engine(ExtendOffer(offer_id="o1", num_tokens=num_tokens, tables=tables))


WITHDRAW, SEAL = by_engine(WithdrawOffer(offer_id="o1")), by_engine(SealOffer(offer_id="o1"))
MORE, GAP = more(48, 2), more(64, 3)
LOST, STOPPED, DUE = EngineLost("engine"), Stopped(), DeadlinePassed()
OPEN, SEALED = opened(sealed=False), opened()


@dataclass(frozen=True)
class Wanted:
    """A tile that a reader asks to have packed under its lease."""

    pack: Pack
    is_state: bool


def tile(
    blocks: tuple[int, ...] = (4,),
    first_block: int = 1,
    stop: int = 32,
    *,
    epoch: int = 1,
    token: str = TOKEN,
    is_state: bool = False,
) -> Wanted:
    pack = Pack(
        **OF,
        engine_id="engine",
        memory_id="memory",
        epoch=epoch,
        rank=0,
        tile=Tile("full", (0,), ("k",), 0, 1, 0, stop),
        table=BlockTable.of(blocks, first_block=first_block),
        slot_lease_s=1.0,
        token=token,
        rank_secret=SECRET,
    )
    return Wanted(pack, is_state)


def said(commands: list[ev.Command]) -> list[Any]:
    """A refusal is its code, a release its outcome; events that are published are left out."""
    words: list[Any] = []
    for command in commands:
        match command:
            case Refuse():
                words.append(command.error.code)
            case SendReply(_, CommitAnswer(committed)):
                words.append(committed)
            case SendReply():
                words.append("ok")
            case ev.BeginLease():
                words.append(f"begin {command.epoch}")
            case ev.EndLease():
                words.append(f"end {command.epoch} {command.code}")
            case ev.ReportReleased():
                words.append(command.released.outcome)
    return words


def answer(table: OfferTable, one: ev.Event | Wanted, now: float) -> list[Any]:
    """What is said to an event, or to who asks for a tile, which changes nothing."""
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
Step = What | tuple[float, What] | tuple[float, What, list[Any]]


def play(*steps: Step) -> OfferTable:
    """Tell a table each event; an event alone comes when the one before did."""
    table, now = OfferTable(LIMITS), 0.0
    for step in steps:
        now, one, *rest = step if isinstance(step, tuple) else (now, step)
        expected: Any = rest[0] if rest else None
        words = answer(table, one, now)
        assert expected is None or words == expected, (now, one)
    return table


NEXT: Process = ("decode-0", "second boot")


def led(
    agent_id: str, boot: str = "first boot", name: str = "before", **more: Any
) -> ev.Asked[Any]:
    """An acquire by a process of some agent."""
    return acquired(name, process=(agent_id, boot), **more)


BEFORE_ALL = opened(tables={"full": BlockTable.of([3, 4], first_block=2)}, num_tokens=64)
STATE = tile((3,), 0, stop=1, is_state=True)
PACKED = ["may be packed"]
TAKE_ENDS = ["ok", "end 1 offer_completed", COMPLETED]
TWICE = opened("o2", request="request-o1")
AGAIN = opened(left_s=0.5)
"""An offer of an earlier process of the agent, with half a second to live."""
LATER: Process = ("decode-0", "second boot")


def before(*tokens: str, transfer_id: str | None = None) -> ev.Restored:
    """An offer that these tokens have committed at an earlier process of the agent."""
    marks = tuple(commit_mark(SECRET, token) for token in tokens)
    return ev.Restored("engine", EndedOffer("o1", "request-o1", SECRET, marks, transfer_id))


def query(token: str = "own", secret: str = SECRET, **named: str) -> ev.Asked[Any]:
    """Whether the offer was committed with this token, by the later process of the reader."""
    message = CommitQuery(secret, token, LATER[1], **{"offer_id": "o1", **named})
    return asked(message)


# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    # takes under a lease
    "a take ends the lease before the blocks are reported released":
        [SEALED, acquired(), (1, held(), TAKE_ENDS)],
    "a take under a lease whose reply was lost is answered ok again and reports nothing":
        [SEALED, acquired(), held(), (1, held(), ["ok"])],
    "a take under a lease before the seal is refused and the lease goes on":
        [OPEN, acquired(), (1, held(), [OFFER_OPEN]), SEAL, (1, held(), TAKE_ENDS)],
    "a take at the end of the lease is late though nobody told the time":
        [SEALED, acquired(lease_s=2.0), (2, held(), ["end 1 lease_expired", LEASE_EXPIRED])],
    "a take under a lease that was given back is stale":
        [SEALED, acquired(), returned(), (1, held(), [STALE])],
    "a reader that has no lease says what it has read":
        [SEALED, (1, held(), [STALE]), (1, taken(), ["ok", COMPLETED])],
    "a reader that lost its lease may say what it has read":
        [SEALED, acquired(lease_s=2.0), (2, held()), (2, taken(), ["ok", COMPLETED])],
    # takes
    "a take of a sealed offer that nobody has leased completes it":
        [SEALED, (1, taken(), ["ok", COMPLETED])],
    "a take whose reply was lost is answered ok again and reports nothing":
        [SEALED, taken(), (1, taken(), ["ok"])],
    "a second take by another token or key is told that the offer is completed":
        [SEALED, taken(), (1, taken(token="another"), [DONE]), (1, taken(holder="other"), [DONE])],
    "a take with the token of the last lease is told that the offer was withdrawn":
        [SEALED, acquired(), WITHDRAW, (1, taken(token=TOKEN), [ErrorCode.OFFER_WITHDRAWN])],
    "a take by another token than under the lease is no repeated one":
        [SEALED, acquired(), held(), (1, taken(), [DONE])],
    "a take while another reader has the lease is busy until that gave it back":
        [SEALED, acquired("another"), (1, taken(), [BUSY]), returned(),
         (1, taken(), ["ok", COMPLETED])],
    "a take by who has the lease ends it before the blocks are reported released":
        [SEALED, acquired(), (1, taken(), TAKE_ENDS)],
    "a take with the reader's name and another key does not end its lease":
        [SEALED, acquired(), (1, taken(holder="other"), [BUSY]), (1, held(), TAKE_ENDS)],
    "a take before the seal is refused and the offer goes on":
        [OPEN, (1, taken(), [OFFER_OPEN]), SEAL, (1, taken(), ["ok", COMPLETED])],
    "a take when the offer expires is late though nobody told the time":
        [opened(ttl_s=1.0), (1, taken(), [EXPIRED, ErrorCode.OFFER_EXPIRED])],
    # how long an offer and a lease last
    "an open offer outlives its ttl while a reader asks to take it":
        [OPEN, *[(now, taken(), [OFFER_OPEN]) for now in (7, 10, 13)], (14, SEAL),
         (14.1, taken(), ["ok", COMPLETED])],
    "a reader that asks no more keeps an open offer for a lease and no longer":
        [OPEN, (7, taken()), (7 + LIMITS.max_lease_s - 0.1, DUE, []),
         (7 + LIMITS.max_lease_s, DUE, [EXPIRED])],
    "readers that ask for ever keep an open offer as long as one may hold it":
        [OPEN,
         *[(7 + n, taken(f"reader-{n}"), [OFFER_OPEN]) for n in range(int(LIMITS.max_hold_s))],
         (7 + LIMITS.max_hold_s, taken(), [EXPIRED, ErrorCode.OFFER_EXPIRED])],
    "who has not the secret does not keep an open offer":
        [OPEN, (7, taken(secret="another"), [FORBIDDEN]), (8, DUE, [EXPIRED])],
    "a lost engine ends an open offer that a reader asks to take":
        [OPEN, (7, taken()), (9, LOST, [WITHDRAWN])],
    "a reader whose lease ended before its offer did is told so":
        [opened(ttl_s=1.0), acquired(lease_s=2.0), (3, DUE), (3, renewed(1), [LEASE_EXPIRED]),
         (3, acquired(), [ErrorCode.OFFER_EXPIRED])],
    "no renewal moves the end of a lease past the longest hold":
        [SEALED, acquired(lease_s=4.0),
         *[(now, renewed(1, lease_s=4.0), ["ok"]) for now in (3, 6, 9)],
         (10, DUE, ["end 1 lease_expired", EXPIRED])],
    "a reader that acquires again and again holds no longer than one that renews":
        [opened(ttl_s=1.0), acquired(lease_s=4.0),
         *[(now, acquired(lease_s=4.0)) for now in (3, 6, 9)],
         (10, DUE, ["end 4 lease_expired", EXPIRED])],
    # a restart of the agent
    "an offer that is published again waits for a reader though its time is over":
        [AGAIN, (LIMITS.reader_return_s - 0.1, DUE, []), (LIMITS.reader_return_s, DUE, [EXPIRED])],
    "an offer that is published again takes the place of another one if need be":
        [opened("o2"), opened("o3"), (0, AGAIN, ["ok"])],
    "an offer that is sent again is the same one":
        [SEALED, acquired(), (1, SEALED, ["ok"]), (1, held(), TAKE_ENDS)],
    "an offer that has ended is reported again when it is sent again":
        [SEALED, taken(), (1, AGAIN, ["ok", COMPLETED]), (1, taken(), ["ok"])],
    "an offer outlives the end of its engine's connection and the end of its agent":
        [SEALED, acquired(), (1, LOST, ["end 1 engine_lost", WITHDRAWN]), (2, AGAIN, ["ok"]),
         (3, taken(), ["ok", COMPLETED])],
    "the id of an offer is not that of another one":
        [SEALED, (1, opened(request="another"), [ErrorCode.OFFER_EXISTS]), WITHDRAW,
         (1, opened(request="another"), [ErrorCode.OFFER_EXISTS])],
    "a commit whose reply was lost with the agent is answered by the next one":
        [before("own"), (1, taken(), ["ok"]), (1, taken(token="another"), [DONE]),
         (1, acquired(), [DONE])],
    "what this agent has completed itself it does not enter again":
        [SEALED, taken(), before("own", "another"), (1, taken(token="another"), [DONE])],
    "an offer that was committed before is not there for who awaits it":
        [asked(AwaitOffer(NAME, 1.0)), (0, before("own", transfer_id=NAME), [DONE])],
    # whether an earlier process of the reader has committed
    "a commit is known by its token and the secret":
        [SEALED, taken(), (1, query(), [True]), (1, query(token="other"), [False]),
         (1, query(secret="wrong"), [FORBIDDEN])],
    "so it is at the next agent":
        [before("own"), (1, query(), [True]), (1, query(token="other"), [False])],
    "of a rendezvous it is known by its name":
        [before("own", transfer_id=NAME), (1, query(secret=NAME, offer_id=""), [True])],
    "after a no only the later process of the reader commits with the token":
        [SEALED, (1, query(), [False]), (2, taken(process=("decode-0", "first boot")), [STALE]),
         (3, taken(token="another's", process=("decode-1", "boot"), blocks=None), [STALE]),
         (3, taken(process=LATER), ["ok", COMPLETED])],
    "so many tokens may be denied, and no more":
        [SEALED, (1, query(token="0"), [False]), (1, query(token="1"), [False]),
         (2, query(token="one more"), [BUSY]), (2, query(token="0"), [False])],
    # who may read, and who must wait
    "one offer more than the limit is busy":
        [opened("o1"), opened("o2"), (0, opened("o3"), [BUSY])],
    "a request is not offered twice until its first offer is released":
        [SEALED, (0, TWICE, [ErrorCode.OFFER_EXISTS]), WITHDRAW, (0, TWICE, ["ok"])],
    "an agent that drains takes no new offers and finishes the old ones":
        [SEALED, acquired(), DrainStarted(), (1, opened("o2"), [ErrorCode.DRAINING]),
         (1, held(), TAKE_ENDS)],
    # a reader at several agents
    "a part has a lease beside its reader and its take does not end the offer":
        [SEALED, acquired(), (0, acquired("part", part=True), ["ok", "begin 2"]),
         (1, held("part", part=True), ["ok", "end 2 offer_completed"]), (1, held(), TAKE_ENDS)],
    "a part takes no place of a reader":
        [SEALED, acquired("part", part=True), (0, acquired(), ["ok", "begin 2"]),
         (0, acquired("another"), [BUSY])],
    "a take of a part whose reply was lost is answered ok again":
        [SEALED, acquired(), acquired("part", part=True), held("part", part=True),
         (1, held("part", part=True), ["ok"])],
    "an offer is not over while a part has a lease though its reader is gone":
        [opened(ttl_s=1.0), acquired(), acquired("part", part=True), returned(),
         (1.5, DUE, []), (2, DUE, ["end 2 lease_expired", EXPIRED])],
    "a part that was read without a lease says what it has read and ends nothing":
        [SEALED, (0, taken("part", token="its own", part=True), ["ok"]),
         (1, taken(), ["ok", COMPLETED])],
    "parts that are live or done are as many as may be":
        [SEALED, acquired("one", part=True), held("one", part=True), acquired("two", part=True),
         (0, acquired("three", part=True), [BUSY]), (0, acquired("two", part=True),
         ["end 3 stale", "ok", "begin 4"])],
    # several readers
    "as many readers as may have a lease at once and the next waits":
        [opened(readers=2), acquired("a", token="a"), acquired("b", token="b"),
         (1, acquired("c", token="c"), [BUSY]), (1, returned(1, "a"), ["ok", "end 1 stale"]),
         (1, acquired("c", token="c"), ["ok", "begin 3"])],
    "the blocks are released when the last reader has everything":
        [opened(readers=3), acquired("a", token="a"), acquired("b", token="b"),
         (1, held("b"), ["ok", "end 2 offer_completed"]), (1, taken("c"), ["ok"]),
         (1, held("a"), TAKE_ENDS)],
    "who comes when all others have read is the last one":
        [opened(readers=2), taken("a"), acquired("b", token="b"),
         (1, taken("c", token="other"), [BUSY]),
         (1, held("b"), ["ok", "end 2 offer_completed", COMPLETED]),
         (1, acquired("c"), [DONE])],
    "a yes whose reply was lost is said again and counts once":
        [opened(readers=3), acquired("a", token="a"), held("a"), taken("b"),
         (1, held("a"), ["ok"]), (1, taken("b"), ["ok"]),
         (1, taken("c", token="other"), ["ok", COMPLETED]), (1, held("a"), ["ok"]),
         (1, taken("b"), ["ok"])],
    "a yes is said again after any number of readers that gave up":
        [opened(readers=2), acquired("a", token="a"), held("a"),
         *[step for n in range(3, 13) for step in (acquired(f"{n}", token="b"), returned(n, "b"))],
         (1, held("a"), ["ok"])],
    "a reader that is late does not disturb another":
        [opened(readers=2), acquired("a", token="a"), acquired("b", token="b"),
         (1, renewed(2, lease_s=4.0, token="b"), ["ok"]),
         (3, held("a"), ["end 1 lease_expired", LEASE_EXPIRED]),
         (3, held("b"), ["ok", "end 2 offer_completed"])],
    "the token of one reader is not the right of another":
        [opened(readers=2), acquired("a", token="a"), acquired("b", token="b"),
         (1, renewed(2, token="a"), [FORBIDDEN]), (1, renewed(1), [FORBIDDEN])],
    "a withdrawn offer revokes every lease before it is reported released":
        [opened(readers=2, sealed=False), acquired("a", token="a"), acquired("b", token="b"),
         (1, WITHDRAW, ["ok", "end 1 offer_withdrawn", "end 2 offer_withdrawn", WITHDRAWN]),
         (1, held("a"), [ErrorCode.OFFER_WITHDRAWN]),
         (1, held("b"), [ErrorCode.OFFER_WITHDRAWN])],
    "an offer that fewer have read than may is completed by its time to live":
        [opened(readers=2), acquired("a", token="a"), held("a"), (8, DUE, [COMPLETED]),
         (8, acquired("b"), [ErrorCode.OFFER_EXPIRED])],
    "a lease of any reader outlasts the time to live":
        [opened(readers=2, ttl_s=1.0), acquired("a"), (0.5, acquired("b", lease_s=4.0)),
         (2, DUE, ["end 1 lease_expired"]), (4.5, DUE, ["end 2 lease_expired", EXPIRED])],
    # the next process of a reader
    "the next process of a reader has what the one before had at once":
        [SEALED, led("decode-0"),
         (1, acquired("after", process=NEXT), ["end 1 stale", "ok", "begin 2"]),
         (1, held("before"), [STALE])],
    "the next process of a reader takes what the one before had at once":
        [SEALED, led("decode-0"),
         (1, taken("after", process=NEXT), TAKE_ENDS)],
    "the next process of a reader ends all leases of the one before":
        [opened(readers=2), *[led("decode-0", name=name, token=name) for name in "ab"],
         (1, acquired("after", process=NEXT), ["end 1 stale", "end 2 stale", "ok", "begin 3"])],
    "the process of another agent has to wait":
        [SEALED, led("decode-1"), (1, acquired("after", process=NEXT), [BUSY])],
    "another reader in the same process has to wait":
        [SEALED, led("decode-0", NEXT[1]), (1, acquired("after", process=NEXT), [BUSY])],
    "the next process with another key has to wait":
        [SEALED, led("decode-0"), (1, acquired("after", process=NEXT, holder="other"), [BUSY]),
         (1, taken("after", process=NEXT, holder="other"), [BUSY])],
    "a process without a name is the next of none":
        [SEALED, led(""), (1, led("", "second boot", "after"), [BUSY])],
    # the blocks
    "what was read out of other blocks than those of the offer is nothing":
        [SEALED, (1, taken(blocks=(3, 5)), [GEOMETRY]), (1, taken(), ["ok", COMPLETED])],
    "nor is what a ticket named that had other tokens or another engine":
        [SEALED, (1, taken(num_tokens=33), [GEOMETRY]), (1, taken(num_tokens=17), [GEOMETRY]),
         (1, taken(engine_id="other"), [GEOMETRY]), (1, taken(), ["ok", COMPLETED])],
    "a tile is packed while its lease lives":
        [SEALED, acquired(), (1.999, tile(), PACKED), (2, tile(), [LEASE_EXPIRED])],
    "a tile is packed out of the blocks of the offer":
        [SEALED, acquired(), (1, tile((3,)), [GEOMETRY]), (1, tile((4, 5)), [GEOMETRY]),
         (1, tile((3, 4), 0, stop=33), [GEOMETRY]), (1, tile((3, 4), 0), PACKED)],
    "a tile is packed out of no block before those of the offer":
        [BEFORE_ALL, acquired(), (1, tile((3,), 0, stop=16), [GEOMETRY])],
    "a tile is packed for who has the lease":
        [SEALED, acquired(), (1, tile(epoch=2), [STALE]), (1, tile(token="wrong"), [FORBIDDEN])],
    "a tile is not packed after the end of its offer":
        [SEALED, acquired(), WITHDRAW, (1, tile(), [ErrorCode.OFFER_WITHDRAWN]),
         (1, tile(epoch=2), [STALE])],
    "a state is packed once its offer is sealed":
        [OPEN, acquired(), (1, STATE, [OFFER_OPEN]), SEAL, (1, STATE, PACKED)],
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
}
ANYTHING = [MORE, GAP, SEAL, WITHDRAW, acquired(), renewed(1), held(), taken(), returned()]


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


LATE: dict[str, Callable[[int], ev.Event]] = {
    "renew": renewed,
    "return": returned,
}
ENDS: dict[ErrorCode, ev.Event] = {
    ErrorCode.OFFER_WITHDRAWN: WITHDRAW,
    ErrorCode.ENGINE_LOST: LOST,
    ErrorCode.DRAINING: STOPPED,
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_late_reader_is_told_stale_or_end_and_changes_nothing(
    late: Callable[[int], ev.Event],
) -> None:
    for made in (SEALED, OPEN):
        table = play(made, acquired(), acquired(), (1, late(1), [STALE]), (1, tile(), [STALE]))

        assert (table.num_leases, table.deadlines.next()) == (1, 2.0)
    for code, end in ENDS.items():
        steps = [(1, one, [code]) for one in (late(1), acquired(), taken(), tile())]

        play(SEALED, acquired(), end, *steps)


def granted(commands: list[ev.Command]) -> Granted:
    (body,) = (one.body for one in commands if isinstance(one, SendReply))
    assert isinstance(body, Granted)
    return body


WRONG_RIGHTS = {
    "acquire": acquired(secret="wrong", token="new"),
    "take": taken(secret="wrong"),
    "take under a lease": held(secret="wrong"),
    "withdraw": asked(PeerWithdraw(**OF, secret="wrong")),
    "renew": renewed(1, token="wrong"),
    "return": returned(1, "wrong"),
    "an empty token": renewed(1, token=""),
    "renew by another key": renewed(1, holder="other"),
    "return by another key": returned(holder="other"),
    "no ascii": renewed(1, token="t\u00f6ken"),
}


@pytest.mark.parametrize("wrong", WRONG_RIGHTS.values(), ids=WRONG_RIGHTS)
@pytest.mark.parametrize("situation", ["leased", "leased and open"])
def test_wrong_right_is_refused_without_detail_or_any_change(
    wrong: ev.Event, situation: str
) -> None:
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
        for event in acquired("second"), taken("second"):
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
