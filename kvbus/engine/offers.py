"""The offers of a prefill engine, and when their blocks come back.

Blocks are the engine's again when the offer has ended. An offer outlives its agent: the link
publishes it again to the next one.
"""

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
from kvbus.engine.asking import NOT_BEGUN, Asking, Pending
from kvbus.engine.connection import Connection
from kvbus.engine.later import Later, Runner
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
from kvbus.protocol.word import WordNames

BlockIds = Mapping[str, npt.ArrayLike]
"""Block ids by group, in order of position."""
ENDED_KEPT_S = 60.0
"""How long a committed offer is kept for the next agent: a reader may repeat its request."""
AGENT_ENDS = (
    ErrorCode.DRAINING,
    ErrorCode.CLOSED,
    ErrorCode.STALE,
    ErrorCode.ENGINE_LOST,
    ErrorCode.NOT_REGISTERED,
)
"""Refusals of an agent that ends, or has lost the connection: the next agent has the offer."""


class OfferOptions(TypedDict, total=False):
    """What an offer can be told besides its tokens and blocks."""

    sealed: bool
    """False for an open offer: `Offer.extend` and `Offer.seal` follow. True by default."""
    ttl_s: float | None
    """Seconds that it waits for a reader; None lets the agent choose."""
    first_blocks: Mapping[str, int] | None
    """By group, which block of the request its table starts at: a group with a window may have
    kept only its tail."""
    audience: str
    """Where the site signs tickets: the one decode engine, or agent, that may use this one."""
    prompt_digest: str
    """What the prompt is known by, see `prompt_digest`; a fetch with another one is refused."""
    transfer_id: str | None
    """The offer's name, a secret: who shows it is given the ticket, and may ask for it before the
    offer is made. A router makes it and has both engines told, see `Rendezvous`. Refused with
    ``offer_exists`` when there was an offer of that name, with ``cancelled`` when its reader has
    given it up."""
    readers: int
    """So many may use the ticket, each of which gets all of it; the blocks come back when the last
    one has it, or after ``ttl_s`` when fewer come. 1 by default."""
    traceparent: str
    """The trace that the request belongs to, as W3C Trace Context writes it; what is none is
    ignored. The ticket carries it."""


class Offer(Pending[MakeOffer]):
    """One offer of a prefill engine.

    Its calls return at once, in any thread, and go out in their order. What they return need not be
    waited for: an error of one of them ends the offer, and is `error`. ``ended`` is how it ended:
    then its blocks are the engine's again.

    An offer outlives its agent, and so does its ticket. While there is no agent, calls wait, but
    `withdraw` ends the offer at once. An offer whose ``ttl_s`` passes meanwhile has expired.
    ``ended`` raises why an offer could not be made, and `ClosedError` when the link was closed. One
    that a stopped agent has not answered has an `error`, and ends when that says so after all, or
    is gone.

    In an event loop, ``await`` it: it is then made, or this raises why not.
    """

    def __init__(self, runner: Runner, message: MakeOffer, ask_until: float) -> None:
        super().__init__(message, ask_until)
        self.request_id = message.request_id
        self.made: Later[dict[str, Any]] = Later(runner)
        """The ticket, once the agent has made the offer; an error when it did not."""
        self.ended: Later[Outcome] = Later(runner)
        self.error: KVBusError | None = None
        """Why the agent or the link ended it before its time."""
        self._runner, self._ends = runner, _ends(message.tables)
        self._connection: Connection | None = None
        """With the agent that has the offer."""
        self._made = OfferMade("", {})
        self._changes: list[ExtendOffer | SealOffer] = []
        """Those that are not in ``message`` yet."""
        self._waiting: list[Callable[[], None]] = []
        self._unanswered: list[Later[None]] = []
        self._words: WordNames | None = None
        self._has_waited = False
        self.expires_at = 0.0
        """By `time.monotonic`; a live lease outlasts it."""
        self.is_away = self.is_withdrawn = False
        """Whether no agent has it; whether its engine has withdrawn it."""
        self.on_withdrawn: Callable[[Offer], None] = lambda _: None
        """Called when it is withdrawn while it is away."""

    def __await__(self) -> Generator[Any, None, "Offer"]:
        yield from self.made.__await__()
        return self

    @property
    def ticket(self) -> dict[str, Any]:
        """The JSON-able ticket for the decode engine; waits until there is one, or raises why not.

        In an event loop, ``await`` the offer before. Raises `LocalError` in the event loop of the
        link while there is none.
        """
        self.made.wait()
        return dict(self._made.ticket)

    @property
    def offer_id(self) -> str:
        """The agent's name of it; empty before it is made."""
        return self._made.offer_id

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while it has not, and when no agent says so."""
        has_outcome = self.ended.done() and self.ended.exception() is None
        return self.ended.result() if has_outcome else None

    def extend(
        self,
        num_tokens: int,
        block_ids: BlockIds | None = None,
        *,
        first_blocks: Mapping[str, int] | None = None,
    ) -> Later[None]:
        """Say that ``num_tokens`` are ready in all; ``block_ids`` are the new blocks only.

        They continue where the group's table ended; ``first_blocks`` says where those of groups
        without a table start. Raises `GeometryError` for ids that are no unsigned 32-bit integers.
        """
        tables = tables_of(block_ids or {}, {**(first_blocks or {}), **self._ends})
        self._ends |= _ends(tables)
        return self._send(lambda offer_id: ExtendOffer(offer_id, num_tokens, tables))

    def seal(self) -> Later[None]:
        """Say that all tokens are ready."""
        return self._send(SealOffer)

    def withdraw(self) -> Later[None]:
        """End the offer, because its request was aborted; `ended` follows."""
        return self._send(WithdrawOffer)

    def ticket_naming(
        self,
        num_tokens: int,
        block_ids: BlockIds,
        *,
        first_blocks: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """The ticket of an open offer that is going to be sealed with exactly these blocks.

        A decode agent may read them at once, and asks for the seal after that: give this ticket
        away when all tokens are computed, and write to the blocks no more. It is `ticket` itself
        where the agent lets nothing be added: it signs tickets, or the blocks are too many.
        """
        ticket = self.ticket
        if not self._made.ticket_blocks:
            return ticket
        tables = tables_of(block_ids, first_blocks)
        blocks = packed_tables(tables, max_blocks=self._made.ticket_blocks)
        return ticket | {"num_tokens": num_tokens, "blocks": blocks} if blocks else ticket

    def begin(self, connection: Connection | None, made: OfferMade) -> None:
        """Called by `Offers`: the agent has made it, or has it again."""
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
        """Called by `Offers`: its agent is lost, and no reader commits it from here on.

        Return the mark of the commit that came before, if there was one. The offer waits for the
        next agent for at least ``agent_wait_s``, but only the first time.
        """
        self._connection, self.is_away = None, bool(self._made.offer_id)
        if not self._has_waited:
            self._has_waited = True
            self.expires_at = max(self.expires_at, time.monotonic() + agent_wait_s)
        return self._close_word()

    def again(self) -> MakeOffer:
        """Called by `Offers`: the request that publishes it again, as it is by now."""
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
        """Called by `Offers`: what the next agent needs to know of one that was committed."""
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
        """Called by `Offers`: the agent has not answered. It may yet, so this is not the end."""
        self.error = self.error or error
        self.made.settle(error)
        self._go_on()

    def use_word(self, words: WordNames) -> None:
        """Called by `Offers` each time that it is asked for: a reader of this machine may take it
        by a word, which is there before the agent can tell of it.
        """
        self._close_word()
        if self.message.sealed and self.message.readers == 1:
            self._words, self.message = words, replace(self.message, word=words.open())

    def end(self, outcome: Outcome | KVBusError) -> None:
        """Called by `Offers`: it ended, or there is none."""
        self._close_word()  # before anyone is told that the blocks are free
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

    def _close_word(self) -> tuple[int, ...]:
        """Return the mark of the commit that was found there."""
        if self._words is None or not self.message.word:
            return ()
        commits = self._words.close(self.message.word)
        self.message = replace(self.message, word=0)
        return commits

    def _send(self, message: Callable[[str], Request[Empty]]) -> Later[None]:
        done: Later[None] = Later(self._runner)
        self._runner.post(partial(self._ask, message, done))
        return done

    def _ask(self, make: Callable[[str], Request[Empty]], done: Later[None]) -> None:
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
        """Keep what the next agent has to know."""
        if isinstance(message, ExtendOffer | SealOffer):
            self._changes.append(message)
            self._wait_on()

    def _wait_on(self) -> None:
        """Its time to live starts again."""
        self.expires_at = max(self.expires_at, time.monotonic() + self._made.ttl_s)
        self._has_waited = False

    def _on_reply(
        self, message: Request[Empty], done: Later[None], reply: Empty | KVBusError
    ) -> None:
        connection = self._connection
        if not isinstance(reply, KVBusError):
            done.settle(None)
        elif self.ended.done() and isinstance(reply, PeerLost):
            done.settle(self.error)  # without one, the agent had done it before it was lost
        elif connection is None or self.ended.done():
            done.settle(reply)
        elif connection.lost is not None or reply.code in AGENT_ENDS:
            if isinstance(message, WithdrawOffer):
                done.settle(None)  # it ends when the connection does
            else:
                self._unanswered.append(done)
        else:
            done.settle(reply)
            if self.error is None:
                self.error = reply
                self.withdraw()


# Why a yes is right though the agent that gives it did not make the offer (invariant 2). The bytes
# of an offer are good from its ticket until its engine writes to the blocks again. The engine does
# so only when the offer has ended here, in its link:
#
#     engine   last write                                       ended ▶ writes again
#     link     offer ─────────── lost ·· away ·· publish again ──▶┘
#     agent 1    └▶ live ─── killed                                :
#     agent 2                      starts ── not ready ─▶ live ─ commit: yes ─▶ released
#     reader        └ ticket, READ, READ fails ·········▶ handshake, lease, READ, commit ┘
#
# - While an agent may have the offer, from the request that publishes it to the end of the
#   connection, it ends here only by what that agent reports.
# - While it is away, no agent can say yes. The lost one is dead, or hung up: it finds that this
#   side hung up as well before it says yes (`EngineDirectory.end_if_left`). So it may end here: by
#   a withdrawal, its time to live, or the end of the link. Then it is never published again.
# - A word is closed here in the moment in which the agent is lost. A swap is before that or finds
#   it closed. The first is a commit: the offer has completed. After the second a reader asks the
#   next agent.
# - So an agent that has the offer live when the commit comes says yes to bytes that nothing has
#   written since the ticket, whichever agent they were read from. That holds for a read that began
#   before the crash, too.
# - The memory must be the same: an engine whose ranks have other memory loses its offers
#   (`RanksReady`).
#
# No reader is lost either. Until the link has published all, the agent refuses the engine's readers
# with ``engine_not_ready``, and they ask again. A reader that got no reply to its commit repeats
# it, with its token. If the offer has ended by that commit, the agent knows it by the mark, which
# the agent before reported with the end, or which the link found in the word:
#
#     agent 1  commit: yes ──▶ killed before the reply has left
#                └▶ released, mark
#     link                └─ kept ─────▶ republished: the mark
#     agent 2                                 └ commit, the same token: yes
#     reader   commit ·········· no reply ········┘
#
# An offer that its agent completed without a word, and was killed before it could report that, is
# published again as if nobody had read it. Its blocks are as they were: another reader gets the
# right bytes, and if none comes, it expires.


class Offers(Asking[Offer]):
    """The offers of one engine that its agents have made, or will."""

    def __init__(self, words: SharedSegment | None = None, *, agent_wait_s: float = 10.0) -> None:
        super().__init__(agent_wait_s=agent_wait_s)
        self._offers: dict[str, Offer] = {}
        """Those that were made and have not ended, by offer id."""
        self._asked: dict[Offer, None] = {}
        """Those that an agent may make."""
        self._expiries: dict[Offer, asyncio.TimerHandle] = {}
        """Of those that are away."""
        self._ended: deque[tuple[float, EndedOffer]] = deque(maxlen=MAX_ENDED)
        self._memory = ""
        self._words = None if words is None else WordNames(words.swap)

    @property
    def republishes(self) -> bool:
        """Whether the next agent has to be told of what the one before had."""
        return bool(self._offers or self._asked or self._ended)

    def ended_lately(self) -> tuple[EndedOffer, ...]:
        """Those that were committed, for readers that repeat their request."""
        since = time.monotonic() - ENDED_KEPT_S
        return tuple(ended for at, ended in self._ended if at >= since)

    def check_memory(self, memory: str) -> None:
        """End all offers if this is not the memory in which they are."""
        if self._memory not in ("", memory):
            for offer in list(self._offers.values()):
                message = "a rank of the engine has other memory than when the offer was made"
                self._end(offer, LocalError(message, code=ErrorCode.ENGINE_LOST))
        self._memory = memory

    def opened(self, connection: Connection) -> None:
        """Publish again what the agent before had; then what waits."""
        if connection is self.connection:
            return
        self.connection = connection
        connection.events = self
        for offer in list(self._offers.values()):
            self._publish_again(offer, connection)
        super().opened(connection)

    def ask(self, one: Offer) -> None:
        one.on_withdrawn = self._end_withdrawn
        if self._words is not None:
            one.use_word(self._words)
        if self.connection is not None:
            self._asked[one] = None
        super().ask(one)

    def answered(self, one: Offer, reply: OfferMade) -> None:
        self._asked.pop(one, None)
        self._offers[reply.offer_id] = one
        one.begin(self.connection, reply)

    def on_refusal(self, connection: Connection, one: Offer, error: KVBusError) -> None:
        """Without a clear no, the agent may have made it."""
        if connection.lost is None and not isinstance(error, RequestRefused):
            one.give_up(error)
            return
        self._asked.pop(one, None)
        if commits := one.detach(self._agent_wait_s):  # by a reader that awaited it
            self._complete(one, commits)
        elif one.error is None:
            super().on_refusal(connection, one, error)
        else:
            self.refused(one, error)

    def refused(self, one: Offer, error: KVBusError) -> None:
        self._asked.pop(one, None)
        one.end(error)

    def give_up(self, now: float, error: KVBusError) -> None:
        """As the others: its blocks come back later."""
        for offer in self._asked:
            if now >= offer.ask_until:
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
        """Keep those that the agent had, for the next one."""
        super().on_lost(error)
        asked, self._asked = self._asked, {}
        for offer in asked:
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
        """There is no next agent: those that are away have ended."""
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
        """An agent that ends, or is lost, has not refused it: it waits for the next one."""
        if not isinstance(reply, KVBusError):
            offer.begin(connection, reply)
        elif connection.lost is None and reply.code not in NOT_BEGUN:
            self._end(offer, reply)

    def _expire(self, offer: Offer) -> None:
        """Look at its time again, which grows with what is added to it."""
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
    """Copies the ids; raises `GeometryError` as `Link.offer` does."""
    fields: dict[str, Any] = {**options}
    first_blocks = fields.pop("first_blocks", None)
    if without := sorted((first_blocks or {}).keys() - block_ids.keys()):
        raise GeometryError(f"no blocks are given for {', '.join(without)}", field="first_blocks")
    fields["traceparent"] = known_trace(fields.get("traceparent", ""))
    return MakeOffer(
        request_id=request_id,
        num_tokens=num_tokens,
        tables=tables_of(block_ids, first_blocks),
        asked_s=time.monotonic(),
        offer_id=new_secret(),
        secret=new_secret(),
        **fields,
    )


def _ends(tables: Mapping[str, BlockTable]) -> dict[str, int]:
    return {group: table.first_block + len(table) for group, table in tables.items()}


def check_groups(engine: EngineSpec, named: Iterable[str]) -> None:
    """Raise `GeometryError` when a group is named that the engine does not have."""
    if unknown := sorted(set(named) - {group.name for group in engine.groups}):
        raise GeometryError(f"the engine has no group {', '.join(unknown)}", field="block_ids")


def tables_of(
    block_ids: BlockIds, first_blocks: Mapping[str, int] | None = None
) -> dict[str, BlockTable]:
    """Copies of the ids, by group; raises `GeometryError` for ids that are none."""
    firsts = first_blocks or {}
    return {
        group: BlockTable.of(ids, first_block=firsts.get(group, 0))
        for group, ids in block_ids.items()
    }
