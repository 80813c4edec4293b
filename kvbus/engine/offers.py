"""The offers of a prefill engine."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy.typing as npt
from msgspec.structs import replace

from kvbus.bus import new_secret
from kvbus.engine.asking import NOT_BEGUN, PendingRequest, RequestRetrier
from kvbus.engine.connection import Connection
from kvbus.engine.later import Completion, Runner
from kvbus.errors import (
    ClosedError,
    ErrorCode,
    GeometryError,
    KVBusError,
    LocalError,
    PeerLost,
    RequestRefused,
)
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.memory.segment import SharedSegment
from kvbus.protocol.commit_cell import CellNames
from kvbus.protocol.engine import (
    MAX_ENDED,
    EndedOffer,
    ExtendOffer,
    MakeOffer,
    OfferMade,
    Outcome,
    Released,
    SealOffer,
    WithdrawOffer,
)
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty, Request, from_body
from kvbus.protocol.ticket import packed_tables
from kvbus.protocol.tools import known_trace

BlockIds = Mapping[str, npt.ArrayLike]
"""By group, in order of position."""
ENDED_KEPT_S = 60.0
"""The reader of a committed offer may repeat its request at the next agent."""
AGENT_ENDS = (
    ErrorCode.DRAINING,
    ErrorCode.CLOSED,
    ErrorCode.STALE,
    ErrorCode.ENGINE_LOST,
    ErrorCode.NOT_REGISTERED,
)


class OfferOptions(TypedDict, total=False):
    """Options of `Link.offer`."""

    sealed: bool
    """True by default; otherwise `Offer.extend` and `Offer.seal` follow."""
    ttl_s: float | None
    """Time to wait for a reader; None lets the agent choose."""
    first_blocks: Mapping[str, int] | None
    """Index in the request of each table's first block, for windows."""
    audience: str
    """With signed tickets: the decode engine or agent that may use this one."""
    prompt_digest: str
    """A fetch with another `prompt_digest` is refused."""
    transfer_id: str | None
    """A secret name, sent by a router to both engines (`Rendezvous`).

    It gives access to the ticket. The error ``offer_exists`` means that it was used, ``cancelled``
    that the reader has declined."""
    readers: int
    """1 by default; each gets everything."""
    traceparent: str
    """W3C trace of the request; ignored if invalid."""


class Offer(PendingRequest[MakeOffer]):
    """An offer of a prefill engine; the engine may reuse its blocks when ``ended`` has the outcome.

    Calls return immediately, in any thread, and keep their order. Their results may be ignored: an
    error ends the offer and is its `error`. If the agent is stopped, `error` comes before the end.
    ``await`` the offer until it is made.

    ``ended`` raises a refusal, and `ClosedError` after the link closed.
    """

    def __init__(self, runner: Runner, message: MakeOffer, retry_until: float) -> None:
        super().__init__(message, retry_until)
        self.request_id = message.request_id
        self.made: Completion[dict[str, Any]] = Completion(runner)
        self.ended: Completion[Outcome] = Completion(runner)
        self.error: KVBusError | None = None
        self._runner, self._ends = runner, _ends(message.tables)
        self._connection: Connection | None = None
        self._made = OfferMade("", {})
        self._changes: list[ExtendOffer | SealOffer] = []
        self._waiting: list[Callable[[], None]] = []
        self._unanswered: list[Completion[None]] = []
        self._cells: CellNames | None = None
        self._has_waited = False
        self.expires_at = 0.0
        """By `time.monotonic`; a live lease outlasts it."""
        self.is_away = self.is_withdrawn = False
        self.on_withdrawn: Callable[[Offer], None] = lambda _: None

    def __await__(self) -> Generator[Any, None, "Offer"]:
        yield from self.made.__await__()
        return self

    @property
    def ticket(self) -> dict[str, Any]:
        """The JSON-able ticket; blocks until it exists. Raises the refusal.

        In an event loop, ``await`` the offer first.
        """
        self.made.wait()
        return dict(self._made.ticket)

    @property
    def offer_id(self) -> str:
        return self._made.offer_id

    @property
    def outcome(self) -> Outcome | None:
        """None before the end, and when no agent reports it."""
        has_outcome = self.ended.done() and self.ended.exception() is None
        return self.ended.result() if has_outcome else None

    def extend(
        self,
        num_tokens: int,
        block_ids: BlockIds | None = None,
        *,
        first_blocks: Mapping[str, int] | None = None,
    ) -> Completion[None]:
        """Report ``num_tokens`` ready tokens in all; ``block_ids`` has the new blocks only.

        ``first_blocks`` is for groups without a table. Raises `GeometryError` for invalid ids.
        """
        tables = tables_of(block_ids or {}, {**(first_blocks or {}), **self._ends})
        self._ends |= _ends(tables)
        return self._send(lambda offer_id: ExtendOffer(offer_id, num_tokens, tables))

    def seal(self) -> Completion[None]:
        return self._send(SealOffer)

    def withdraw(self) -> Completion[None]:
        """End the offer of an aborted request; `ended` follows."""
        return self._send(WithdrawOffer)

    def ticket_naming(
        self,
        num_tokens: int,
        block_ids: BlockIds,
        *,
        first_blocks: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Return a ticket for an open offer that will be sealed with exactly these blocks.

        Send it after all tokens are computed, and then do not write to the blocks: a decode agent
        may read immediately. Returns `ticket` if the agent signs tickets or the blocks are too
        many.
        """
        ticket = self.ticket
        if not self._made.ticket_blocks:
            return ticket
        tables = tables_of(block_ids, first_blocks)
        blocks = packed_tables(tables, max_blocks=self._made.ticket_blocks)
        return ticket | {"num_tokens": num_tokens, "blocks": blocks} if blocks else ticket

    def begin(self, connection: Connection | None, made: OfferMade) -> None:
        if self.ended.done():
            return
        is_first = not self._made.offer_id
        self._connection, self._made = connection, made
        if is_first:
            self._wait_on()
        unanswered, self._unanswered = self._unanswered, []
        for done in unanswered:
            done.settle(None)
        self._go_on()
        self.made.settle(dict(made.ticket))
        if self.error is not None:
            self.withdraw()

    def detach(self, agent_wait_s: float) -> tuple[int, ...]:
        """Return the mark of a commit in the cell, if any; afterwards no reader commits."""
        self._connection, self.is_away = None, bool(self._made.offer_id)
        if not self._has_waited:
            self._has_waited = True
            self.expires_at = max(self.expires_at, time.monotonic() + agent_wait_s)
        return self._close_cell()

    def again(self) -> MakeOffer:
        self.is_away, first, now = False, self.message, time.monotonic()
        num_tokens, sealed, tables = first.num_tokens, first.sealed, dict(first.tables)
        for change in self._changes:
            if isinstance(change, ExtendOffer):
                num_tokens = change.num_tokens
                for group, more in change.tables.items():
                    known = tables.get(group)
                    tables[group] = more if known is None else known.extended(more)
            else:
                sealed = True
        self._changes = []
        self.message = replace(first, num_tokens=num_tokens, sealed=sealed, tables=tables)
        return replace(self.message, left_s=max(0.0, self.expires_at - now))

    def as_ended(self, commits: tuple[int, ...]) -> EndedOffer:
        message = self.message
        grown = [one.num_tokens for one in self._changes if isinstance(one, ExtendOffer)]
        return EndedOffer(
            self.offer_id or message.offer_id,
            self.request_id,
            message.secret or "",
            commits,
            message.transfer_id,
            num_tokens=max([message.num_tokens, *grown]),
        )

    def give_up(self, error: KVBusError) -> None:
        """Fail calls to a silent agent; it may still reply."""
        self.error = self.error or error
        self.made.settle(error)
        self._go_on()

    def use_cell(self, cells: CellNames) -> None:
        """Open a new cell: a local reader may commit before the agent's reply."""
        self._close_cell()
        if self.message.sealed and self.message.readers == 1:
            self._cells, self.message = cells, replace(self.message, cell=cells.open())

    def end(self, outcome: Outcome | KVBusError) -> None:
        self._close_cell()  # before the blocks are reported free
        self.is_away = False
        if isinstance(outcome, KVBusError):
            self.error = self.error or outcome
        self.made.settle(self.error or LocalError(f"the offer is {outcome}"))  # if it was not made
        unanswered, self._unanswered = self._unanswered, []
        for done in unanswered:
            done.settle(self.error or ClosedError("the offer has ended"))
        if not self.ended.done():
            self.ended.settle(outcome)
            self.on_end(self)
        self._go_on()

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def _close_cell(self) -> tuple[int, ...]:
        if self._cells is None or not self.message.cell:
            return ()
        commits = self._cells.close(self.message.cell)
        self.message = replace(self.message, cell=0)
        return commits

    def _send(self, message: Callable[[str], Request[Empty]]) -> Completion[None]:
        done: Completion[None] = Completion(self._runner)
        self._runner.post(partial(self._ask, message, done))
        return done

    def _ask(self, make: Callable[[str], Request[Empty]], done: Completion[None]) -> None:
        message = make(self.offer_id)
        is_end = isinstance(message, WithdrawOffer)
        self.is_withdrawn |= is_end
        if is_end and self.ended.done():
            done.settle(None)
        elif self._connection is not None:
            self._note(message)
            on_reply = partial(self._on_reply, message, done)
            try:
                self._connection.send(message, on_reply)
            except KVBusError as error:
                on_reply(error)
        elif self.ended.done() or (self.made.done() and not self.offer_id):
            done.settle(self.error or ClosedError("the offer has ended"))
        elif not self.is_away:
            self._waiting.append(partial(self._ask, make, done))
        elif self.is_withdrawn:
            self.on_withdrawn(self)
            done.settle(None)
        else:
            self._note(message)
            self._unanswered.append(done)

    def _note(self, message: Request[Empty]) -> None:
        if isinstance(message, ExtendOffer | SealOffer):
            self._changes.append(message)
            self._wait_on()

    def _wait_on(self) -> None:
        self.expires_at = max(self.expires_at, time.monotonic() + self._made.ttl_s)
        self._has_waited = False

    def _on_reply(
        self, message: Request[Empty], done: Completion[None], reply: Empty | KVBusError
    ) -> None:
        connection = self._connection
        if not isinstance(reply, KVBusError):
            done.settle(None)
        elif self.ended.done() and isinstance(reply, PeerLost):
            done.settle(self.error)  # without an error, the agent had done it
        elif connection is None or self.ended.done():
            done.settle(reply)
        elif connection.lost is not None or reply.code in AGENT_ENDS:
            if isinstance(message, WithdrawOffer):
                done.settle(None)  # it ends with the connection
            else:
                self._unanswered.append(done)
        else:
            done.settle(reply)
            if self.error is None:
                self.error = reply
                self.withdraw()


# Why a commit is right at an agent that did not make the offer (invariant 2). An offer's bytes are
# good from its ticket until its engine writes to the blocks again. The engine does so only after
# the offer has ended here, in its link:
#
#     engine   last write                                       ended ▶ writes again
#     link     offer ─────────── lost ·· away ·· publish again ──▶┘
#     agent 1    └▶ live ─── killed                                :
#     agent 2                      starts ── not ready ─▶ live ─ commit: yes ─▶ released
#     reader        └ ticket, READ, READ fails ·········▶ handshake, lease, READ, commit ┘
#
# - While an agent may have the offer, only that agent's report ends it here. That is from the
#   request that publishes it to the end of the connection.
# - While the offer is away, no agent can commit it. The lost agent is dead or hung up. If it hung
#   up, it notices the closed connection before it commits (`EngineDirectory.end_if_left`). So a
#   withdrawal, the time to live, or the end of the link may end the offer here. It is then never
#   published again.
# - The link closes the cell in the same step in which it loses the agent. An earlier swap is a
#   commit: the offer has completed. A later one fails, and the reader turns to the next agent.
# - So an agent commits a live offer only for bytes that did not change since the ticket. It does
#   not matter which agent they were read from, or whether the read began before the crash.
# - The memory must be the same: an engine whose ranks have other memory loses its offers
#   (`RanksReady`).
#
# Readers are not lost either. Until the link has published all offers, the agent refuses readers of
# the engine with ``engine_not_ready``, and they retry. A reader without a reply to its commit
# repeats it, with its token. If that commit has ended the offer, the agent recognizes it by the
# mark. The agent before reported the mark with the end, or the link found it in the cell:
#
#     agent 1  commit: yes ──▶ killed before the reply has left
#                └▶ released, mark
#     link                └─ kept ─────▶ republished: the mark
#     agent 2                                 └ commit, the same token: yes
#     reader   commit ·········· no reply ········┘
#
# If an agent completes an offer without a cell, and crashes before it reports that, the link
# publishes the offer again. Its blocks have not changed: another reader gets the right bytes, or
# the offer expires.


class Offers(RequestRetrier[Offer]):
    def __init__(self, cells: SharedSegment | None = None, *, agent_wait_s: float = 10.0) -> None:
        super().__init__(agent_wait_s=agent_wait_s)
        self._offers: dict[str, Offer] = {}
        self._requested: dict[Offer, None] = {}
        self._expiries: dict[Offer, asyncio.TimerHandle] = {}
        self._ended: deque[tuple[float, EndedOffer]] = deque(maxlen=MAX_ENDED)
        self._memory = ""
        self._cells = None if cells is None else CellNames(cells.swap)

    @property
    def republishes(self) -> bool:
        return bool(self._offers or self._requested or self._ended)

    def ended_lately(self) -> tuple[EndedOffer, ...]:
        """Return committed offers, for readers that repeat their request."""
        since = time.monotonic() - ENDED_KEPT_S
        return tuple(ended for at, ended in self._ended if at >= since)

    def check_memory(self, memory: str) -> None:
        if self._memory not in ("", memory):
            for offer in list(self._offers.values()):
                message = "a rank of the engine has other memory than when the offer was made"
                self._end(offer, LocalError(message, code=ErrorCode.ENGINE_LOST))
        self._memory = memory

    def opened(self, connection: Connection) -> None:
        if connection is self.connection:
            return
        self.connection = connection
        connection.events = self
        for offer in list(self._offers.values()):
            self._publish_again(offer, connection)
        super().opened(connection)

    def ask(self, one: Offer) -> None:
        one.on_withdrawn = self._end_withdrawn
        if self._cells is not None:
            one.use_cell(self._cells)
        if self.connection is not None:
            self._requested[one] = None
        super().ask(one)

    def answered(self, one: Offer, reply: OfferMade) -> None:
        self._requested.pop(one, None)
        self._offers[reply.offer_id] = one
        one.begin(self.connection, reply)

    def on_refusal(self, connection: Connection, one: Offer, error: KVBusError) -> None:
        """Without a clear refusal, the agent may have made it."""
        if connection.lost is None and not isinstance(error, RequestRefused):
            one.give_up(error)
            return
        self._requested.pop(one, None)
        if commits := one.detach(self._agent_wait_s):  # by a reader that awaited it
            self._complete(one, commits)
        elif one.error is None:
            super().on_refusal(connection, one, error)
        else:
            self.refused(one, error)

    def refused(self, one: Offer, error: KVBusError) -> None:
        self._requested.pop(one, None)
        one.end(error)

    def give_up(self, now: float, error: KVBusError) -> None:
        for offer in self._requested:
            if now >= offer.retry_until:
                offer.give_up(error)

    def on_notice(self, notice: Notice) -> None:
        if notice.op != Released.op:
            return
        released = from_body(Released, notice.body)
        offer = self._offers.get(released.offer_id)
        if offer is None:
            return
        if released.commits:
            self._complete(offer, released.commits)
        else:
            self._end(offer, released.outcome)

    def on_lost(self, error: KVBusError) -> None:
        super().on_lost(error)
        pending, self._requested = self._requested, {}
        for offer in pending:
            offer.end(error)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        for offer in list(self._offers.values()):
            if commits := offer.detach(self._agent_wait_s):
                self._complete(offer, commits)
            elif offer.is_withdrawn or offer.error is not None:
                self._end(offer, offer.error or Outcome.WITHDRAWN)
            elif offer not in self._expiries:
                left_s = max(0.0, offer.expires_at - now)
                self._expiries[offer] = loop.call_later(left_s, self._expire, offer)

    def closed(self) -> None:
        super().closed()
        is_meant = isinstance(self.problem, ClosedError)
        error = self.problem if is_meant else ClosedError("the link was closed")
        for offer in list(self._offers.values()):
            self._end(offer, error)

    def _publish_again(self, offer: Offer, connection: Connection) -> None:
        if (expiry := self._expiries.pop(offer, None)) is not None:
            expiry.cancel()
        try:
            on_reply = partial(self._on_published_again, offer, connection)
            connection.send(offer.again(), on_reply, timeout_s=math.inf)
        except KVBusError as error:
            if connection.lost is None:
                self._end(offer, error)

    def _on_published_again(
        self, offer: Offer, connection: Connection, reply: OfferMade | KVBusError
    ) -> None:
        if not isinstance(reply, KVBusError):
            offer.begin(connection, reply)
        elif connection.lost is None and reply.code not in NOT_BEGUN:
            self._end(offer, reply)

    def _expire(self, offer: Offer) -> None:
        left_s = offer.expires_at - time.monotonic()
        if left_s > 0:
            later = asyncio.get_running_loop().call_later(left_s, self._expire, offer)
            self._expiries[offer] = later
        else:
            self._end(offer, Outcome.EXPIRED)

    def _end_withdrawn(self, offer: Offer) -> None:
        self._end(offer, Outcome.WITHDRAWN)

    def _complete(self, offer: Offer, commits: tuple[int, ...]) -> None:
        self._ended.append((time.monotonic(), offer.as_ended(commits)))
        self._end(offer, Outcome.COMPLETED)

    def _end(self, offer: Offer, outcome: Outcome | KVBusError) -> None:
        self._offers.pop(offer.offer_id, None)
        if (expiry := self._expiries.pop(offer, None)) is not None:
            expiry.cancel()
        offer.end(outcome)


def offer_message(
    request_id: str, num_tokens: int, block_ids: BlockIds, **options: Unpack[OfferOptions]
) -> MakeOffer:
    fields: dict[str, Any] = {**options}
    first_blocks = fields.pop("first_blocks", None)
    if without := sorted((first_blocks or {}).keys() - block_ids.keys()):
        raise GeometryError(f"no blocks are given for {', '.join(without)}", field="first_blocks")
    fields["traceparent"] = known_trace(fields.get("traceparent", ""))
    return MakeOffer(
        request_id=request_id,
        num_tokens=num_tokens,
        tables=tables_of(block_ids, first_blocks),
        sent_s=time.monotonic(),
        offer_id=new_secret(),
        secret=new_secret(),
        **fields,
    )


def _ends(tables: Mapping[str, BlockTable]) -> dict[str, int]:
    return {group: table.first_block + len(table) for group, table in tables.items()}


def check_groups(engine: EngineSpec, named: Iterable[str]) -> None:
    if unknown := sorted(set(named) - {group.name for group in engine.groups}):
        raise GeometryError(f"the engine has no group {', '.join(unknown)}", field="block_ids")


def tables_of(
    block_ids: BlockIds, first_blocks: Mapping[str, int] | None = None
) -> dict[str, BlockTable]:
    firsts = first_blocks or {}
    return {
        group: BlockTable.of(ids, first_block=firsts.get(group, 0))
        for group, ids in block_ids.items()
    }
