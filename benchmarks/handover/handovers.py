"""Handovers as a router does them: the prefill, and the decode request as soon as it is answered.

Refuses to start servers. All times are the client's, of one clock.
"""

import contextlib
import itertools
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .client import Prefilled
from .pairs import Pair


@dataclass(frozen=True, slots=True)
class Handed:
    """One request: its prefill, and its handover, up to the decode's first token.

    The handover begins with the prefill response, or when it is asked for, if that is later.
    """

    prefill_s: float
    began_s: float
    first_token_s: float

    @property
    def handover_s(self) -> float:
        """The time of the handover."""
        return self.first_token_s - self.began_s


class Sides:
    """A connection to each side of a pair, for one thread.

    Without a connector the decode side is asked for a prompt that it has cached, one of ``cached``:
    what is left of a handover is then everything but the KV.
    """

    def __init__(self, pair: Pair, cached: Iterator[str], num_tokens: int) -> None:
        self._prefill, self._decode = pair.prefill.client(), pair.decode.client()
        self._moves, self._cached, self._num_tokens = pair.moves, cached, num_tokens

    def close(self) -> None:
        """End both connections."""
        self._prefill.close()
        self._decode.close()

    def hand_over(self, prompt: str) -> Handed:
        """Prefill on one side, then decode on the other."""
        return self.finish(prompt, self._prefill.prefill(prompt, offer=self._moves))

    def finish(self, prompt: str, prefilled: Prefilled) -> Handed:
        """Decode what was prefilled, whoever asked for that."""
        params = prefilled.kv_transfer_params
        if self._moves and not params:
            raise SystemExit("error: the prefill server's answer has no kv_transfer_params")
        asked = prompt if self._moves else next(self._cached)
        streamed = self._decode.stream(asked, self._num_tokens, params=params)
        prefill_s = prefilled.received_s - prefilled.sent_s
        return Handed(prefill_s, prefilled.received_s, streamed.at_s[0])

    def local_hit_s(self) -> float:
        """Seconds to the first token of a prompt that the decode server has cached."""
        streamed = self._decode.stream(next(self._cached), self._num_tokens)
        return streamed.at_s[0] - streamed.sent_s


@contextlib.contextmanager
def connected(
    pair: Pair, cached: Iterator[str], *, num_sides: int, num_tokens: int
) -> Iterator[list[Sides]]:
    """Connections for ``num_sides`` threads; decode requests are for ``num_tokens`` tokens."""
    sides = [Sides(pair, cached, num_tokens) for _ in range(num_sides)]
    try:
        yield sides
    finally:
        for one in sides:
            one.close()


def closed_loop(sides: Sequence[Sides], prompts: Sequence[str]) -> list[Handed]:
    """Hand all prompts over; each of ``sides`` begins its next one when its last one is done."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)

    def run(one: Sides) -> list[Handed]:
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(one.hand_over(waiting.get_nowait()))
        return done

    with ThreadPoolExecutor(len(sides)) as pool:
        return list(itertools.chain.from_iterable(pool.map(run, sides)))
