"""The offers of a prefill engine: a ticket is reserved while it computes, and published at its end.

The ticket is asked for when a request is first scheduled, so it is there when its last token is. An
offer with a name of the router's grows with each step, as its reader need not wait for the ticket.
The public methods are for the scheduler's thread; offers live in the link's.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from threading import Event
from typing import Any

from kvbus.engine import Offer, PrefillSession
from kvbus.engine.control import ControlSession
from kvbus.errors import ErrorCode, KVBusError, LocalError, RequestRefused
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.blocks import BlockIds, Tables, tables_of
from kvbus.integrations.vllm.params import OfferParams, agents_id, prompt_of_sequence
from kvbus.integrations.vllm.sessions import ControlLink
from kvbus.integrations.vllm.stats import OFFERED_TOKENS, OFFERS, OFFERS_FAILED, StatsRecorder
from kvbus.protocol.engine import Outcome

logger = logging.getLogger("vllm.kvbus")

TICKET_WITHIN_S = 1.0
"""How long the end of a request waits for its ticket, if the agent had answered so far."""
MOST_PROMPTS = 256
"""Those of several sequences whose last offer is known: the sequences end soon after each other."""


class State(Enum):
    """Of a reservation; changed in the link's thread only."""

    OPEN = auto()
    PUBLISHED = auto()
    ABANDONED = auto()
    UNWANTED = auto()
    """Its reader has given it up."""


@dataclass(slots=True, eq=False)
class Reservation:
    """An open offer without blocks, for the ticket of a request that is being computed.

    ``asked`` is the session whose agent has made the offer, or is making it: one of each session.
    ``told`` are the blocks of each group that the offer has by now; extensions have turns. An offer
    with ``transfer_id`` is made once. ``refusal`` is why its agent made none.
    """

    request_id: str
    prompt_digest: str = ""
    transfer_id: str | None = None
    ttl_s: float | None = None
    readers: int = 1
    traceparent: str = ""
    told: dict[str, int] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    state: State = State.OPEN
    asked: PrefillSession | None = None
    offer: Offer | None = None
    refusal: str = ""
    is_made: Event = field(default_factory=Event)

    def untold(self, block_ids: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """What of each table the offer has not yet; from here on it has."""
        more = {group: ids[self.told.get(group, 0) :] for group, ids in block_ids.items()}
        self.told = {group: len(ids) for group, ids in block_ids.items()}
        return {group: ids for group, ids in more.items() if ids}


class Offers:
    """All offers of one prefill engine."""

    def __init__(self, engine: EngineSpec, link: ControlLink, stats: StatsRecorder) -> None:
        self._engine, self._link, self._stats = engine, link, stats
        self._reserved: dict[str, Reservation] = {}
        self._published: dict[str, Reservation] = {}
        self._last_of_prompt: dict[str, str] = {}
        self._released: deque[str] = deque()
        self._answers = True
        link.when_open(self._renew)

    def reserve(
        self,
        request_id: str,
        digest: Callable[[], str],
        asked: OfferParams = OfferParams(),  # noqa: B008 - it is frozen
        *,
        ttl_s: float | None,
        traceparent: str = "",
    ) -> None:
        """Ask for the ticket of a request that is going to be computed; idempotent.

        ``digest`` is called once for what the ticket says of the prompt.
        """
        if request_id in self._reserved:
            return
        reservation = Reservation(
            request_id, digest(), asked.transfer_id, ttl_s, asked.readers, traceparent
        )
        self._reserved[request_id] = reservation
        self._link.post(partial(self._make, reservation))

    def grow(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> None:
        """The first ``num_tokens`` of a request are computed: they may be read."""
        reservation = self._reserved.get(request_id)
        if reservation is not None:
            grow = partial(self._grow, reservation, block_ids, num_tokens)
            self._link.post(lambda _: self._link.spawn(grow))

    def take_back(self, request_id: str) -> None:
        """The request was preempted: nothing of what was told of it may be read.

        Its reader computes it, so it is not offered again.
        """
        reservation = self._reserved.get(request_id)
        if reservation is not None and reservation.transfer_id is not None:
            self._link.post(lambda _: self._abandon(reservation, State.UNWANTED))

    def publish(
        self, request_id: str, block_ids: BlockIds, num_tokens: int
    ) -> dict[str, Any] | None:
        """The ticket of ``num_tokens`` tokens in ``block_ids``, which may be read from here on.

        The blocks are the agent's until `take_released` names the ticket's offer. None, with a line
        in the log, when there is no agent to offer them.
        """
        reservation = self._reserved.pop(request_id, None)
        if reservation is None:
            return None
        self._wait_for_ticket(reservation)
        if reservation.state is State.UNWANTED:
            return None
        offer = reservation.offer
        try:
            tables = tables_of(self._engine, block_ids, 0, num_tokens)
            if offer is None:
                raise LocalError(reservation.refusal or self._why_not())
        except KVBusError as error:
            self._say_not_offered(request_id, error.message)
            self._link.post(lambda _: self._abandon(reservation))
            return None
        self._link.post(lambda _: self._publish(reservation, offer, num_tokens, tables))
        self._published[offer.offer_id] = reservation
        self._end_other_sequences(request_id, offer.offer_id)
        # vLLM has written these tokens for the last time, so their blocks can be named: who was
        # preempted has none or was computed again, and steps scheduled ahead write behind them.
        return offer.ticket_naming(num_tokens, tables.block_ids, first_blocks=tables.first_blocks)

    def abandon(self, request_id: str) -> None:
        """The request has ended without KV to offer."""
        reservation = self._reserved.pop(request_id, None)
        if reservation is not None:
            self._link.post(lambda _: self._abandon(reservation))

    def withdraw(self, offer_id: str) -> None:
        """A published offer may not be read any more: its blocks come back at once."""
        reservation = self._published.get(offer_id)
        if reservation is not None:
            self._link.post(lambda _: self._link.spawn(partial(self._withdraw, reservation)))

    def take_released(self) -> list[str]:
        """The published offers whose blocks are the engine's again, since the last call."""
        released = [self._released.popleft() for _ in range(len(self._released))]
        for offer_id in released:
            self._published.pop(offer_id, None)
        return released

    def _end_other_sequences(self, request_id: str, offer_id: str) -> None:
        """Of several sequences of a prompt each has an offer, and one is read.

        vLLM's answer has the ticket of the one that ended last.
        """
        prompt = prompt_of_sequence(request_id)
        if prompt is None:
            return
        self.withdraw(self._last_of_prompt.pop(prompt, ""))
        self._last_of_prompt[prompt] = offer_id
        if len(self._last_of_prompt) > MOST_PROMPTS:
            del self._last_of_prompt[next(iter(self._last_of_prompt))]

    def _wait_for_ticket(self, reservation: Reservation) -> None:
        """It is there, as a rule. An agent that hangs makes the engine wait once, until it answers.

        The tickets that it gave before it hung are no answer.
        """
        if not reservation.is_made.wait(TICKET_WITHIN_S if self._answers else 0.0):
            self._answers = False

    def _renew(self, session: ControlSession) -> None:
        """The agent is there, again, or another: what waits for a ticket asks for it.

        An agent that is replaced keeps the offers that it has made.
        """
        self._answers = True
        for reservation in list(self._reserved.values()):
            if reservation.asked is None or reservation.asked.lost is not None:
                self._make(reservation, session)

    def _make(self, reservation: Reservation, session: ControlSession | None) -> None:
        if not isinstance(session, PrefillSession):
            reservation.is_made.set()
        elif reservation.asked is not session:
            reservation.asked, reservation.offer, reservation.told = session, None, {}
            reservation.refusal = ""
            reservation.is_made.clear()
            self._link.spawn(partial(self._ask, reservation, session))

    async def _ask(self, reservation: Reservation, session: PrefillSession) -> None:
        request_id = agents_id(reservation.request_id)
        if request_id != reservation.request_id:
            logger.info(
                "kvbus: request %s: agents call it %s, as its id is long",
                reservation.request_id,
                request_id,
            )
        try:
            offer = await session.offer(
                request_id,
                num_tokens=0,
                block_ids={},
                sealed=False,
                ttl_s=reservation.ttl_s,
                prompt_digest=reservation.prompt_digest,
                transfer_id=reservation.transfer_id,
                readers=reservation.readers,
                traceparent=reservation.traceparent,
            )
            self._answers = True
            if reservation.state is not State.OPEN or reservation.asked is not session:
                await offer.withdraw()
                return
            reservation.offer = offer
            offer.when_released(lambda: self._on_released(reservation, offer))
        except RequestRefused as error:
            reservation.refusal = f"{error.message} [{error.code}]"
            if reservation.transfer_id is not None and error.code is ErrorCode.CANCELLED:
                reservation.state = State.UNWANTED
        finally:
            reservation.is_made.set()

    def _on_released(self, reservation: Reservation, offer: Offer) -> None:
        if reservation.offer is not offer:
            return
        if reservation.state is State.PUBLISHED:
            self._released.append(offer.offer_id)
            self._stats.add(OFFERS, (offer.outcome or Outcome.FAILED).value)
        elif offer.outcome is Outcome.WITHDRAWN and reservation.transfer_id is not None:
            reservation.state = State.UNWANTED
        elif reservation.state is State.OPEN:
            reservation.asked = reservation.offer = reservation.transfer_id = None
            if (latest := self._link.session) is not None:
                self._make(reservation, latest)

    async def _grow(self, reservation: Reservation, block_ids: BlockIds, num_tokens: int) -> None:
        """What is not told now, as there is no offer yet, is told with the next step.

        One that was made anew has lost its name, so that nobody can read it yet: it need not grow,
        and has nothing to take back.
        """
        try:
            async with reservation.turn:
                offer, is_named = reservation.offer, reservation.transfer_id is not None
                if offer is not None and is_named and reservation.state is State.OPEN:
                    tables = tables_of(self._engine, block_ids, 0, num_tokens)
                    await offer.extend(num_tokens, reservation.untold(tables.block_ids))
        except KVBusError as error:  # it matters when the request is computed: then it is told
            logger.info(
                "kvbus: request %s: its first %s tokens cannot be read yet: %s [%s]",
                reservation.request_id,
                num_tokens,
                error.message,
                error.code,
            )

    def _publish(
        self, reservation: Reservation, offer: Offer, num_tokens: int, tables: Tables
    ) -> None:
        if reservation.offer is offer and reservation.state is State.OPEN:
            reservation.state = State.PUBLISHED
            self._link.spawn(partial(self._fill, reservation, offer, num_tokens, tables))
            return
        if reservation.state is not State.UNWANTED:
            self._abandon(reservation)
            self._say_not_offered(reservation.request_id, "its ticket expired in that moment")
        self._released.append(offer.offer_id)

    async def _fill(
        self, reservation: Reservation, offer: Offer, num_tokens: int, tables: Tables
    ) -> None:
        """The seal follows the blocks at once: a reader whose ticket names them may wait for it."""
        try:
            async with reservation.turn:
                first_blocks = {} if reservation.told else tables.first_blocks
                more = reservation.untold(tables.block_ids)
                blocks = offer.extend(num_tokens, more, first_blocks=first_blocks)
                await asyncio.gather(blocks, offer.seal())
        except KVBusError as error:
            self._say_not_offered(reservation.request_id, f"{error.message} [{error.code}]")
            await offer.withdraw()
        else:
            self._stats.add(OFFERED_TOKENS, num_tokens)

    async def _withdraw(self, reservation: Reservation) -> None:
        with suppress(KVBusError):  # it has ended by itself, or its agent has
            async with reservation.turn:
                if reservation.offer is not None:
                    await reservation.offer.withdraw()

    def _abandon(self, reservation: Reservation, state: State = State.ABANDONED) -> None:
        reservation.state = state
        if reservation.offer is not None:
            self._link.spawn(reservation.offer.withdraw)

    def _why_not(self) -> str:
        session = self._link.session
        if session is not None and not isinstance(session, PrefillSession):
            return "the agent beside this vLLM is a decode agent, a prefill agent is needed"
        return f"there is no ticket: {self._link.problem or 'the agent has not answered in time'}"

    def _say_not_offered(self, request_id: str, why: str) -> None:
        self._stats.add(OFFERS_FAILED, 1)
        logger.error(
            "kvbus: request %s: its KV is not offered, who decodes it has to compute it again: %s",
            request_id,
            why,
        )
