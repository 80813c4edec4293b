"""The answers of a decode engine, offered at their end for the next turn of the conversation.

Refuses to hold more than its share of the cache: the oldest answer goes for a new one.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbus.integrations.vllm.block_tables import NULL_BLOCK
from kvbus.integrations.vllm.offers import Offers
from kvbus.integrations.vllm.reservations import Reservation

logger = logging.getLogger("vllm.kvbus")


@dataclass(frozen=True, slots=True)
class _Held:
    reservation: Reservation
    num_blocks: int


class Answers:
    """The answers whose blocks wait for the next turn, by offer; for the scheduler's thread."""

    def __init__(self, offers: Offers, *, max_blocks: int, ttl_s: float) -> None:
        self._offers, self._max_blocks, self._ttl_s = offers, max_blocks, ttl_s
        self._held: dict[str, _Held] = {}
        self._num_blocks = 0

    def publish(
        self, request_id: str, digest: str, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> dict[str, Any] | None:
        """The ticket of ``num_tokens`` of prompt and answer; None when they are not offered.

        Waits for the agent's answer, as only now it is known which tokens the ticket is of.
        """
        num_blocks = sum(block != NULL_BLOCK for ids in block_ids for block in ids)
        if num_blocks > self._max_blocks:
            logger.info(
                "kvbus: request %s: its answer is not kept for the next turn: it has %s blocks, "
                "all answers may have %s (decoder_kv_blocks_share)",
                request_id,
                num_blocks,
                self._max_blocks,
            )
            return None
        reservation = self._offers.reserve(request_id, lambda: digest, ttl_s=self._ttl_s)
        ticket = self._offers.publish(request_id, block_ids, num_tokens)
        if ticket is not None:
            self._held[ticket["offer_id"]] = _Held(reservation, num_blocks)
            self._num_blocks += num_blocks
            self._withdraw_oldest()
        return ticket

    def forget(self, released: Iterable[str]) -> None:
        """The blocks of these offers are the engine's again."""
        for offer_id in released:
            self._drop(offer_id)

    def _withdraw_oldest(self) -> None:
        while self._num_blocks > self._max_blocks:
            offer_id, oldest = next(iter(self._held.items()))
            self._offers.withdraw(oldest.reservation)
            self._drop(offer_id)

    def _drop(self, offer_id: str) -> None:
        held = self._held.pop(offer_id, None)
        if held is not None:
            self._num_blocks -= held.num_blocks
