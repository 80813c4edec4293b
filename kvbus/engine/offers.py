"""The offers of a prefill engine, and when their blocks come back.

Blocks are the engine's again when the offer has ended: when its agent says so, or when that is
lost, as nobody can complete a read of them then.
"""

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy.typing as npt
from msgspec.structs import replace

from kvbus.engine.asking import Asking, Pending
from kvbus.engine.connection import Connection
from kvbus.engine.later import Later, Runner
from kvbus.errors import ClosedError, GeometryError, KVBusError, RequestRefused
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.memory.segment import SharedSegment
from kvbus.protocol.engine import (
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
    then its blocks are the engine's again. It raises `PeerLost` when the agent went (the blocks are
    the engine's then, too, be its ranks spread over several agents: leases are held at its home,
    and with it gone no reader can take), and why an offer could not be made. One that a stopped
    agent has not answered has an `error`, and ends when that says so after all, or is gone.

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
        self._made = OfferMade("", {})
        self._waiting: list[Callable[[], None]] = []
        self._words: WordNames | None = None

    def __await__(self) -> Generator[Any, None, "Offer"]:
        yield from self.made.__await__()
        return self

    @property
    def ticket(self) -> dict[str, Any]:
        """The JSON-able ticket for the decode engine; waits until there is one, or raises why not.

        In an event loop, ``await`` the offer before. Raises `LocalError` in the event loop of the
        link while there is none.
        """
        return self.made.wait()

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
        """Called by `Offers`: the agent has made it."""
        self._connection, self._made = connection, made
        self._go_on()
        self.made.settle(dict(made.ticket))
        if self.error is not None:
            self.withdraw()

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
        if isinstance(outcome, KVBusError):
            self.error = self.error or outcome
            self.made.settle(outcome)
        if not self.ended.done():
            self.ended.settle(outcome)
            self.on_end(self)
        self._go_on()

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def _close_word(self) -> None:
        if self._words is not None and self.message.word:
            self._words.close(self.message.word)
            self.message = replace(self.message, word=0)

    def _send(self, message: Callable[[str], Request[Empty]]) -> Later[None]:
        done: Later[None] = Later(self._runner)
        self._runner.post(partial(self._ask, message, done))
        return done

    def _ask(self, message: Callable[[str], Request[Empty]], done: Later[None]) -> None:
        if self._connection is not None:
            try:
                self._connection.send(message(self.offer_id), partial(self._on_reply, done))
            except KVBusError as error:
                self._on_reply(done, error)
        elif self.made.done():
            done.settle(self.error or ClosedError("the offer has ended"))
        else:
            self._waiting.append(partial(self._ask, message, done))

    def _on_reply(self, done: Later[None], reply: Empty | KVBusError) -> None:
        if not isinstance(reply, KVBusError):
            done.settle(None)
            return
        done.settle(reply)
        if self._connection is not None and self.error is None and not self.ended.done():
            self.error = reply
            if self._connection.lost is None:
                self.withdraw()


class Offers(Asking[Offer]):
    """The offers of one engine that its agents have made, or will."""

    def __init__(self, words: SharedSegment | None = None, *, agent_wait_s: float = 10.0) -> None:
        super().__init__(agent_wait_s=agent_wait_s)
        self._offers: dict[str, Offer] = {}
        self._asked: dict[Offer, None] = {}
        """Those that an agent may make."""
        self._words = None if words is None else WordNames(words.swap)

    def ask(self, one: Offer) -> None:
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
        if one.error is None:
            self._asked.pop(one, None)
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
        offer = self._offers.pop(released.offer_id, None)
        if offer is not None:
            offer.end(released.outcome)

    def on_lost(self, error: KVBusError) -> None:
        """Those that the agent had have ended with it."""
        super().on_lost(error)
        offers, self._offers, self._asked = [*self._offers.values(), *self._asked], {}, {}
        for offer in offers:
            offer.end(error)


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
