"""The offers of a prefill engine; after an agent's crash, live ones are published at the next."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvbus.engine.connection import Connection
from kvbus.engine.later import Completion, Runner
from kvbus.engine.retrying import NOT_BEGUN, PendingRequest, RequestRetrier
from kvbus.errors import (
    ClosedError,
    ErrorCode,
    KVBusError,
    LocalError,
    PeerLost,
    RequestRefused,
)
from kvbus.memory.segment import SharedSegment
from kvbus.protocol.commit_cell import CellNames
from kvbus.protocol.engine import (
    MAX_ENDED,
    EndedOffer,
    ExtendOffer,
    MakeOffer,
    OfferMade,
    Outcome,
    Park,
    ParkOffer,
    Released,
    ReportBlocks,
    SealOffer,
    WithdrawOffer,
)
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty, Request, from_body

ENDED_KEPT_S = 60.0
"""The next agent gets a committed offer, as its reader may repeat the request."""
MAX_WAITS = 10
"""Crashes of agents after which an offer is given more time; a hold or a lease may have kept it."""
AGENT_ENDS = (
    ErrorCode.DRAINING,
    ErrorCode.CLOSED,
    ErrorCode.STALE,
    ErrorCode.ENGINE_LOST,
    ErrorCode.NOT_REGISTERED,
)
"""Refusals after which the next agent gets the offer."""

Change = Callable[[str], Request[Empty]]
"""Makes the request from the id of the offer."""


class OfferRequest(PendingRequest[MakeOffer]):
    """An offer in the link's event loop: what the agent knows, and what it still has to get.

    An offer without an agent is *away*, until the next one gets it.
    """

    def __init__(self, runner: Runner, message: MakeOffer, retry_until: float) -> None:
        super().__init__(message, retry_until)
        self.made: Completion[dict[str, Any]] = Completion(runner)
        self.ended: Completion[Outcome] = Completion(runner)
        self.error: KVBusError | None = None
        self.connection: Connection | None = None
        self.reply = OfferMade("", {})
        self._changes: list[ExtendOffer | SealOffer] = []
        """Not in ``message`` yet."""
        self.waiting: list[Callable[[], None]] = []
        self.unanswered: list[Completion[None]] = []
        self._cells: CellNames | None = None
        self._num_waits = 0
        self.expires_at = 0.0
        """By `time.monotonic`; a live lease outlasts it."""
        self.is_away = self.is_withdrawn = False

    @property
    def offer_id(self) -> str:
        """Empty before the offer is made."""
        return self.reply.offer_id

    @property
    def is_parked(self) -> bool:
        ended = self.ended
        return ended.done() and ended.exception() is None and ended.result() is Outcome.PARKED

    @property
    def is_refused(self) -> bool:
        return self.made.done() and not self.offer_id

    def begin(self, connection: Connection | None, made: OfferMade) -> None:
        if self.ended.done():
            return
        is_first = not self.offer_id
        self.connection, self.reply = connection, made
        if is_first:
            self._extend_time()
        self._settle_unanswered(None)
        self._resume()
        self.made.settle(dict(made.ticket))

    def detach(self, agent_wait_s: float) -> tuple[int, ...]:
        """Return the mark of a commit in the cell, if any; afterwards no reader commits.

        The offer waits at least ``agent_wait_s`` for the next agent, unless agents crash all the
        time. Only agents know whether a reader keeps the offer longer than its ``ttl_s``.
        """
        self.connection, self.is_away = None, bool(self.offer_id)
        if self._num_waits < MAX_WAITS:
            self._num_waits += 1
            self.expires_at = max(self.expires_at, time.monotonic() + agent_wait_s)
        return self._close_cell()

    def publication(self) -> MakeOffer:
        self.is_away, first, now = False, self.message, time.monotonic()
        num_tokens, sealed, tables = first.num_tokens, first.sealed, dict(first.tables)
        after = max([first.after, *(change.after for change in self._changes)])
        for change in self._changes:
            if isinstance(change, ExtendOffer):
                num_tokens = change.num_tokens
                for group, more in change.tables.items():
                    known = tables.get(group)
                    tables[group] = more if known is None else known.extended(more)
            else:
                sealed = True
        self._changes = []
        self.message = replace(
            first, num_tokens=num_tokens, sealed=sealed, tables=tables, after=after
        )
        return replace(self.message, left_s=max(0.0, self.expires_at - now))

    def as_ended(self, commits: tuple[int, ...]) -> EndedOffer:
        message = self.message
        grown = [one.num_tokens for one in self._changes if isinstance(one, ExtendOffer)]
        return EndedOffer(
            self.offer_id or message.offer_id,
            message.request_id,
            message.secret or "",
            commits,
            message.transfer_id,
            num_tokens=max([message.num_tokens, *grown]),
        )

    def give_up(self, error: KVBusError) -> None:
        """Fail calls to a silent agent; it may still reply."""
        self.error = self.error or error
        self.made.settle(error)
        self._resume()

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
        self._settle_unanswered(self.error or ClosedError("the offer has ended"))
        if not self.ended.done():
            self.ended.settle(outcome)
            self.call_last()
        self._resume()

    def add(self, change: Request[Empty]) -> None:
        """Keep ``change`` for the next agent."""
        if isinstance(change, ExtendOffer | SealOffer):
            self._changes.append(change)
            self._extend_time()
        elif isinstance(change, ParkOffer):
            self.message = replace(self.message, park=Park.ALWAYS)

    def _extend_time(self) -> None:
        self.expires_at = max(self.expires_at, time.monotonic() + self.reply.ttl_s)
        self._num_waits = 0

    def _resume(self) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()

    def _settle_unanswered(self, outcome: KVBusError | None) -> None:
        unanswered, self.unanswered = self.unanswered, []
        for done in unanswered:
            done.settle(outcome)

    def _close_cell(self) -> tuple[int, ...]:
        """Return the mark of a commit in it."""
        if self._cells is None or not self.message.cell:
            return ()
        commits = self._cells.close(self.message.cell)
        self.message = replace(self.message, cell=0)
        return commits


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


class Offers(RequestRetrier[OfferRequest]):
    def __init__(self, cells: SharedSegment | None = None, *, agent_wait_s: float = 10.0) -> None:
        super().__init__(agent_wait_s=agent_wait_s)
        self._offers: dict[str, OfferRequest] = {}
        self._requested: dict[OfferRequest, None] = {}
        """Those that an agent may make."""
        self._expiries: dict[OfferRequest, asyncio.TimerHandle] = {}
        self._ended: deque[tuple[float, EndedOffer]] = deque(maxlen=MAX_ENDED)
        self._memory = ""
        self.is_short = False
        """Whether the engine runs short of blocks."""
        self._cells = None if cells is None else CellNames(cells.swap)

    @property
    def republishes(self) -> bool:
        return bool(self._offers or self._requested or self._ended)

    def ended_lately(self) -> tuple[EndedOffer, ...]:
        """Return committed offers, for readers that repeat their request."""
        since = time.monotonic() - ENDED_KEPT_S
        return tuple(ended for at, ended in self._ended if at >= since)

    def check_memory(self, memory: str) -> None:
        """End all offers unless they lie in this memory."""
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
        if self.is_short:
            self.report_blocks()

    def report_blocks(self) -> None:
        if self.connection is not None:
            with suppress(KVBusError):  # the next agent gets it again
                self.connection.send(ReportBlocks(self.is_short), lambda _: None)

    def submit(self, one: OfferRequest) -> None:
        if self._cells is not None:
            one.use_cell(self._cells)
        if self.connection is not None:
            self._requested[one] = None
        super().submit(one)

    def change(self, offer: OfferRequest, make: Change, done: Completion[None]) -> None:
        """Send the change now, or keep it until an agent has made the offer."""
        message = make(offer.offer_id)
        is_end = isinstance(message, WithdrawOffer)
        offer.is_withdrawn |= is_end
        if offer.ended.done() and isinstance(message, WithdrawOffer | ParkOffer):
            done.settle(None)
            if is_end and offer.is_parked and offer.connection is self.connection:
                self._end_parked(message)
        elif offer.connection is not None:
            offer.add(message)
            on_reply = partial(self._on_changed, offer, message, done)
            try:
                offer.connection.send(message, on_reply)
            except KVBusError as error:
                on_reply(error)
        elif offer.ended.done() or offer.is_refused:
            done.settle(offer.error or ClosedError("the offer has ended"))
        elif not offer.is_away:
            offer.waiting.append(partial(self.change, offer, make, done))
        elif is_end:
            self._end(offer, Outcome.WITHDRAWN)
            done.settle(None)
        else:
            offer.add(message)
            offer.unanswered.append(done)

    def _end_parked(self, message: Request[Empty]) -> None:
        """End a parked offer, which no reader will read; its time to live ends it otherwise."""
        if self.connection is not None:
            with suppress(KVBusError):
                self.connection.send(message, lambda _: None)

    def _on_changed(
        self,
        offer: OfferRequest,
        message: Request[Empty],
        done: Completion[None],
        reply: Empty | KVBusError,
    ) -> None:
        connection = offer.connection
        if not isinstance(reply, KVBusError):
            done.settle(None)
        elif offer.ended.done() and isinstance(reply, PeerLost):
            done.settle(offer.error)  # without an error, the agent had completed it
        elif connection is None or offer.ended.done():
            done.settle(reply)
        elif connection.lost is not None or reply.code in AGENT_ENDS:
            if isinstance(message, WithdrawOffer):
                done.settle(None)  # it ends with the connection
            else:
                offer.unanswered.append(done)
        elif isinstance(message, ParkOffer):
            done.settle(reply)
        else:
            done.settle(reply)
            if offer.error is None:
                offer.error = reply
                self.change(offer, WithdrawOffer, Completion())

    def accepted(self, one: OfferRequest, reply: OfferMade) -> None:
        self._requested.pop(one, None)
        self._offers[reply.offer_id] = one
        self._begin(one, self.connection, reply)

    def on_refusal(self, connection: Connection, one: OfferRequest, error: KVBusError) -> None:
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

    def refused(self, one: OfferRequest, error: KVBusError) -> None:
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

    def _begin(self, offer: OfferRequest, connection: Connection | None, made: OfferMade) -> None:
        has_ended = offer.ended.done()
        offer.begin(connection, made)
        if not has_ended and offer.error is not None:
            self.change(offer, WithdrawOffer, Completion())

    def _publish_again(self, offer: OfferRequest, connection: Connection) -> None:
        if (expiry := self._expiries.pop(offer, None)) is not None:
            expiry.cancel()
        try:
            on_reply = partial(self._on_published_again, offer, connection)
            connection.send(offer.publication(), on_reply, timeout_s=math.inf)
        except KVBusError as error:
            if connection.lost is None:
                self._end(offer, error)

    def _on_published_again(
        self, offer: OfferRequest, connection: Connection, reply: OfferMade | KVBusError
    ) -> None:
        if not isinstance(reply, KVBusError):
            self._begin(offer, connection, reply)
        elif connection.lost is None and reply.code not in NOT_BEGUN:
            self._end(offer, reply)

    def _expire(self, offer: OfferRequest) -> None:
        """Check again, as extensions add time."""
        left_s = offer.expires_at - time.monotonic()
        if left_s > 0:
            later = asyncio.get_running_loop().call_later(left_s, self._expire, offer)
            self._expiries[offer] = later
        else:
            self._end(offer, Outcome.EXPIRED)

    def _complete(self, offer: OfferRequest, commits: tuple[int, ...]) -> None:
        self._ended.append((time.monotonic(), offer.as_ended(commits)))
        self._end(offer, Outcome.COMPLETED)

    def _end(self, offer: OfferRequest, outcome: Outcome | KVBusError) -> None:
        self._offers.pop(offer.offer_id, None)
        if (expiry := self._expiries.pop(offer, None)) is not None:
            expiry.cancel()
        offer.end(outcome)
