"""The control session of a prefill engine: offers, and when their blocks come back.

Refuses to guess about blocks: they are the engine's again when `Offer.released` returns, or when
the session is lost, as nobody can complete a read of them then.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import numpy.typing as npt

from kvbus.engine.control import ControlSession
from kvbus.engine.session import EngineSession, Latch, SessionOptions
from kvbus.errors import GeometryError, KVBusError
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.protocol.engine import (
    AgentRole,
    ExtendOffer,
    MakeOffer,
    OfferMade,
    Outcome,
    Released,
    SealOffer,
    WithdrawOffer,
)
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import from_body
from kvbus.protocol.ticket import packed_tables
from kvbus.protocol.trace import known_trace

BlockIds = Mapping[str, npt.ArrayLike]
OnReleased = Callable[[Released], None]


class Offer:
    """One offer of this engine. ``ticket`` is a JSON-able dict for the decode engine."""

    def __init__(
        self, session: EngineSession, request_id: str, made: OfferMade, ends: dict[str, int]
    ) -> None:
        self.offer_id, self.request_id = made.offer_id, request_id
        self.ticket: dict[str, Any] = dict(made.ticket)
        self._session, self._ends = session, ends
        self._ticket_blocks = made.ticket_blocks
        self.ended = Latch()
        self._outcome: Outcome | None = None

    async def extend(
        self,
        num_tokens: int,
        block_ids: BlockIds | None = None,
        *,
        first_blocks: Mapping[str, int] | None = None,
    ) -> None:
        """Say that ``num_tokens`` are ready in all; ``block_ids`` are the new blocks only.

        They continue where the group's table ended; ``first_blocks`` says where those of groups
        without a table start, as for `PrefillSession.offer`. Raises `GeometryError` for ids that
        are none.
        """
        tables = _tables(block_ids or {}, {**(first_blocks or {}), **self._ends})
        message = ExtendOffer(offer_id=self.offer_id, num_tokens=num_tokens, tables=tables)
        await self._session.request(message)
        self._ends |= _ends(tables)

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
        if not self._ticket_blocks:
            return self.ticket
        tables = _tables(block_ids, first_blocks or {})
        blocks = packed_tables(tables, max_blocks=self._ticket_blocks)
        return self.ticket | {"num_tokens": num_tokens, "blocks": blocks} if blocks else self.ticket

    async def seal(self) -> None:
        """Say that all tokens are ready."""
        await self._session.request(SealOffer(offer_id=self.offer_id))

    async def withdraw(self) -> None:
        """End the offer, because its request was aborted; `released` follows."""
        await self._session.request(WithdrawOffer(offer_id=self.offer_id))

    async def released(self) -> Outcome:
        """How the offer ended, once its blocks are the engine's again.

        Raises `PeerLost` when the agent went; the blocks are the engine's then, too, be its ranks
        spread over several agents: leases are held at its home, and with it gone no reader can
        take.
        """
        await self.ended.wait()
        if self._outcome is None:
            raise self._session.lost or KVBusError("the offer ended without an outcome")
        return self._outcome

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while it has not, and when its agent went."""
        return self._outcome

    def when_released(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once when the offer has ended; at once when it has by now."""
        self.ended.when_set(call)

    def end(self, outcome: Outcome | None) -> None:
        """Called by the session: the offer ended, None when the session did."""
        self._outcome = outcome
        self.ended.set()


class PrefillSession(ControlSession):
    """Registers a prefill engine and offers the KV of its requests.

    ``on_released`` is called for each offer that ended, for engines that do not wait for each; with
    outcome ``failed`` for those that were left when the session ended.
    """

    serves = AgentRole.PREFILL

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        on_released: OnReleased | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(attach_path, engine, **options)
        self._on_released = on_released
        self._offers: dict[str, Offer] = {}

    async def offer(
        self,
        request_id: str,
        *,
        num_tokens: int,
        block_ids: BlockIds,
        sealed: bool = True,
        ttl_s: float | None = None,
        first_blocks: Mapping[str, int] | None = None,
        audience: str = "",
        prompt_digest: str = "",
        transfer_id: str | None = None,
        readers: int = 1,
        traceparent: str = "",
    ) -> Offer:
        """Offer ``num_tokens`` tokens that lie in ``block_ids`` (by group, in order of position).

        With ``sealed`` False the offer is open: `Offer.extend` and `Offer.seal` follow.
        A group with a window may have kept only its tail: ``first_blocks`` says which block of the
        request its table starts at. A state has one block. Raises `GeometryError` for ids that are
        none and for a first block without a table, and `RequestRefused`, for an agent without room
        when ``request_timeout_s`` has passed.

        Only the decode engine or agent of the name ``audience`` may use the ticket, only for the
        prompt that its engine knows by the same ``prompt_digest``: where the site signs tickets.

        Whoever shows ``transfer_id`` is given the ticket, and may ask for it before the offer is
        made: a router makes it, and has both engines told, see `kvbus.protocol.ticket`. Refused
        with ``offer_exists`` when there was an offer of that name, with ``cancelled`` when its
        reader has given it up.

        The ticket may be used by so many ``readers``, each of which gets all of it; the blocks come
        back when the last one has it, or after ``ttl_s`` when fewer come.

        ``traceparent`` is the trace that the request belongs to, as W3C Trace Context writes it;
        the ticket carries it. What is none is ignored.
        """
        asked_s, first_blocks = time.monotonic(), first_blocks or {}
        if without := sorted(first_blocks.keys() - block_ids.keys()):
            raise GeometryError(
                f"no blocks are given for {', '.join(without)}", field="first_blocks"
            )
        tables = _tables(block_ids, first_blocks)
        message = MakeOffer(
            request_id=request_id,
            num_tokens=num_tokens,
            tables=tables,
            sealed=sealed,
            ttl_s=ttl_s,
            audience=audience,
            prompt_digest=prompt_digest,
            transfer_id=transfer_id,
            readers=readers,
            traceparent=known_trace(traceparent),
            asked_s=asked_s,
        )

        session = self
        while True:
            try:
                return await session._make(message)
            except KVBusError as error:
                session = await session.next_for(error)

    async def _make(self, message: MakeOffer) -> Offer:
        def keep(made: OfferMade) -> Offer:
            ends = _ends(message.tables)
            offer = self._offers[made.offer_id] = Offer(self, message.request_id, made, ends)
            return offer

        return await self.when_not_busy(lambda: self.request_as(message, keep))

    def _on_notice(self, notice: Notice) -> None:
        if notice.op != Released.op:
            return
        released = from_body(Released, notice.body)
        offer = self._offers.pop(released.offer_id, None)
        if offer is not None:
            offer.end(released.outcome)
        if self._on_released is not None:
            self._on_released(released)

    def _going_on(self) -> Latch | None:
        return next((offer.ended for offer in self._offers.values()), None)

    def _on_lost(self, error: KVBusError) -> None:
        offers, self._offers = self._offers, {}
        for offer in offers.values():
            offer.end(None)
            if self._on_released is not None:
                self._on_released(Released(offer.offer_id, offer.request_id, Outcome.FAILED))


def _ends(tables: Mapping[str, BlockTable]) -> dict[str, int]:
    return {group: table.first_block + len(table) for group, table in tables.items()}


def _tables(block_ids: BlockIds, first_blocks: Mapping[str, int]) -> dict[str, BlockTable]:
    return {
        group: BlockTable.of(ids, first_block=first_blocks.get(group, 0))
        for group, ids in block_ids.items()
    }
