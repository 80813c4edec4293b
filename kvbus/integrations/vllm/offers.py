"""The offers of a prefill engine: a ticket is reserved while it computes, and published at its end.

The ticket is asked for when a request is first scheduled, so it is there when its last token is. An
offer with a name of the router's grows with each step, as its reader need not wait for the ticket.
All of it is for the scheduler's thread.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

from kvbus.engine import Link, Offer, OfferOptions
from kvbus.errors import ErrorCode, KVBusError, LocalError, PeerLost
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.blocks import BlockIds, tables_of
from kvbus.integrations.vllm.params import agents_id, prompt_of_sequence
from kvbus.integrations.vllm.stats import OFFERED_TOKENS, OFFERS, OFFERS_FAILED, KvbusStats
from kvbus.protocol.engine import Outcome

logger = logging.getLogger("vllm.kvbus")

TICKET_WITHIN_S = 1.0
"""How long the end of a request waits for its ticket, unless it is known that the agent hangs."""
MOST_PROMPTS = 256
"""Those of several sequences whose last offer is known: the sequences end soon after each other."""


@dataclass(slots=True, eq=False)
class Reservation:
    """An open offer without blocks, for the ticket of a request that is being computed.

    ``told`` are the blocks of each group that the offer has by now. It is ``unwanted`` when its
    reader has given it up, or computes what it names.
    """

    request_id: str
    options: OfferOptions
    offer: Offer = field(init=False)
    told: dict[str, int] = field(init=False)
    is_unwanted: bool = False

    @property
    def is_named(self) -> bool:
        """Whether it has a name of the router's, so that it is read while it grows."""
        return self.options.get("transfer_id") is not None

    def ask(self, link: Link) -> None:
        """Have an agent make the offer, as soon as there is one."""
        self.told = {}
        name = agents_id(self.request_id)
        self.offer = link.offer(name, num_tokens=0, block_ids={}, **self.options)

    def untold(self, block_ids: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """What of each table the offer has not yet; from here on it has."""
        more = {group: ids[self.told.get(group, 0) :] for group, ids in block_ids.items()}
        self.told = {group: len(ids) for group, ids in block_ids.items()}
        return {group: ids for group, ids in more.items() if ids}


class Offers:
    """All offers of one prefill engine."""

    def __init__(self, engine: EngineSpec, link: Link, stats: KvbusStats) -> None:
        self._engine, self._link, self._stats = engine, link, stats
        self._reserved: dict[str, Reservation] = {}
        self._published: dict[str, Offer] = {}
        self._released: list[str] = []
        self._last_of_prompt: dict[str, str] = {}
        self._late: Offer | None = None

    def reserve(
        self, request_id: str, digest: Callable[[], str], **options: Unpack[OfferOptions]
    ) -> None:
        """Ask for the ticket of a request that is going to be computed; idempotent.

        ``digest`` is called once for what the ticket says of the prompt.
        """
        if request_id in self._reserved:
            return
        options |= {"sealed": False, "prompt_digest": digest()}
        reservation = Reservation(request_id, options)
        self._reserved[request_id] = reservation
        reservation.ask(self._link)
        if reservation.offer.request_id != request_id:
            logger.info(
                "kvbus: request %s: agents call it %s, as its id is long",
                request_id,
                reservation.offer.request_id,
            )

    def grow(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> None:
        """The first ``num_tokens`` of a request are computed: they may be read."""
        reservation = self._reserved.get(request_id)
        if reservation is None or not reservation.is_named or reservation.is_unwanted:
            return
        try:
            tables = tables_of(self._engine, block_ids, 0, num_tokens)
        except KVBusError as error:  # it matters when the request is computed: then it is told
            logger.info(
                "kvbus: request %s: its first %s tokens cannot be read yet: %s",
                request_id,
                num_tokens,
                error.message,
            )
        else:
            reservation.offer.extend(num_tokens, reservation.untold(tables.block_ids))

    def take_back(self, request_id: str) -> None:
        """The request was preempted: nothing of what was told of it may be read.

        Its reader computes it, so it is not offered again.
        """
        reservation = self._reserved.get(request_id)
        if reservation is not None and reservation.is_named:
            reservation.is_unwanted = True
            reservation.offer.withdraw()

    def abandon(self, request_id: str) -> None:
        """The request has ended without KV to offer."""
        reservation = self._reserved.pop(request_id, None)
        if reservation is not None:
            reservation.offer.withdraw()

    def publish(
        self, request_id: str, block_ids: BlockIds, num_tokens: int
    ) -> dict[str, Any] | None:
        """The ticket of ``num_tokens`` tokens in ``block_ids``, which may be read from here on.

        The blocks are the agent's until `take_released` names the ticket's offer. None, with a line
        in the log, when there is no agent to offer them.
        """
        reservation = self._reserved.get(request_id)
        if reservation is None:
            return None
        try:
            tables = tables_of(self._engine, block_ids, 0, num_tokens)
            offer = self._made(reservation)
        except KVBusError as error:
            if not reservation.is_unwanted:
                self._say_not_offered(request_id, f"{error.message} [{error.code}]")
            self.abandon(request_id)
            return None
        del self._reserved[request_id]
        first_blocks = {} if reservation.told else tables.first_blocks
        offer.extend(num_tokens, reservation.untold(tables.block_ids), first_blocks=first_blocks)
        offer.seal()
        self._published[offer.offer_id] = offer
        self._stats.add(OFFERED_TOKENS, num_tokens)
        self._end_other_sequences(request_id, offer.offer_id)
        # vLLM has written these tokens for the last time, so their blocks can be named: a request
        # that was preempted has none or was computed again, and steps scheduled ahead write behind.
        return offer.ticket_naming(num_tokens, tables.block_ids, first_blocks=tables.first_blocks)

    def withdraw(self, offer_id: str) -> None:
        """A published offer may not be read any more: its blocks come back at once."""
        offer = self._published.get(offer_id)
        if offer is not None:
            offer.withdraw()

    def end(self, offer: Offer) -> None:
        """The link says that an offer has ended."""
        if self._published.pop(offer.offer_id, None) is None:
            for reservation in self._reserved.values():
                if reservation.offer is offer:
                    self._ask_again(reservation)
            return
        self._released.append(offer.offer_id)
        self._stats.add(OFFERS, (offer.outcome or Outcome.FAILED).value)
        if offer.error is not None and not isinstance(offer.error, PeerLost):
            self._say_not_offered(offer.request_id, f"{offer.error.message} [{offer.error.code}]")

    def take_released(self) -> list[str]:
        """The published offers whose blocks are the engine's again, since the last call."""
        released, self._released = self._released, []
        return released

    def _made(self, reservation: Reservation) -> Offer:
        """The offer, which has a ticket; raises why it has none.

        The ticket is there, as a rule. An agent that hangs makes the engine wait once, until it has
        answered.
        """
        if reservation.offer.ended.done():
            self._ask_again(reservation)
        offer = reservation.offer
        answers = self._link.is_open and (self._late is None or self._late.made.done())
        try:
            offer.made.wait(TICKET_WITHIN_S if answers else 0.0)
        except TimeoutError as error:
            self._late = offer
            why = self._link.problem or "the agent has not answered in time"
            raise LocalError(f"there is no ticket: {why}", code=ErrorCode.TIMEOUT) from error
        if offer.ended.done():
            raise offer.error or LocalError("its ticket expired in that moment")
        return offer

    def _ask_again(self, reservation: Reservation) -> None:
        """Its offer has ended: expired, or gone with its agent. The next one has no name any more.

        So nobody can read that while it is computed, and it does not grow.
        """
        offer = reservation.offer
        error, was_made = offer.error, bool(offer.offer_id)
        if reservation.is_named:
            is_cancelled = error is not None and error.code == ErrorCode.CANCELLED
            withdrawn = error is None and offer.outcome is Outcome.WITHDRAWN
            reservation.is_unwanted |= is_cancelled or withdrawn
        if reservation.is_unwanted or not (error is None or isinstance(error, PeerLost)):
            return
        if was_made:
            reservation.options["transfer_id"] = None
        if was_made or self._link.is_open:
            reservation.ask(self._link)

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

    def _say_not_offered(self, request_id: str, why: str) -> None:
        self._stats.add(OFFERS_FAILED, 1)
        logger.error(
            "kvbus: request %s: its KV is not offered, who decodes it has to compute it again: %s",
            request_id,
            why,
        )
