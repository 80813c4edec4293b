"""The offers of one prompt of which a prefill vLLM makes several sequences, as a router asked for.

vLLM computes and offers each, and its answer has the ticket of the one that ended last. Nobody has
those of the others, so their offers end.
"""

from functools import partial

from kvbus.engine import Offer
from kvbus.integrations.vllm.request_ids import prompt_of_sequence
from kvbus.integrations.vllm.reservations import Reservation
from kvbus.integrations.vllm.sessions import ControlLink

MOST_PROMPTS = 256
"""Those whose last ticket is remembered: sequences of one prompt end soon after each other."""


class Sequences:
    """The last published offer of each prompt of several sequences; for the scheduler's thread."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._last: dict[str, tuple[Reservation, Offer]] = {}

    def publish(self, reservation: Reservation, offer: Offer) -> None:
        """An offer is published: the one of the same prompt before it ends."""
        prompt = prompt_of_sequence(reservation.request_id)
        if prompt is None:
            return
        before = self._last.pop(prompt, None)
        if before is not None:
            self._link.post(lambda _: self._link.spawn(partial(_withdraw, *before)))
        self._last[prompt] = reservation, offer
        if len(self._last) > MOST_PROMPTS:
            del self._last[next(iter(self._last))]


async def _withdraw(reservation: Reservation, offer: Offer) -> None:
    """Once it has its blocks."""
    async with reservation.turn:
        await offer.withdraw()
