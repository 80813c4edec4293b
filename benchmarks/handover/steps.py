"""Engine steps while KV moves: the gaps in a steady stream, and prefills one after the other.

Refuses to look into an engine: a step is what a client sees of it.
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from .client import Client, Prefilled, Streamed
from .handovers import Handed, Sides

BACKGROUND_PROMPT_TOKENS, BACKGROUND_TOKENS = 32, 256

T = TypeVar("T")


@dataclass(slots=True)
class Steps:
    """When the tokens of the stream came, as pairs of neighbours, and what was moved meanwhile."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)

    def all_s(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [end - start for start, end in self.gaps]

    def in_handovers_s(self) -> list[float]:
        """Those of them that overlap a handover."""
        spans = [(one.began_s, one.first_token_s) for one in self.handed]
        return [
            end - start
            for start, end in self.gaps
            if any(start < last and first < end for first, last in spans)
        ]


def quiet_steps(client: Client, background: Sequence[str]) -> Steps:
    """The stream alone."""
    steps = Steps()
    _stream_into(steps, client, background, threading.Event())
    return steps


@contextlib.contextmanager
def steps_beside(client: Client, background: Sequence[str]) -> Iterator[Steps]:
    """The steps of a stream that goes on in the ``with`` block; all are there after it."""
    steps, stop = Steps(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(_stream_into, steps, client, itertools.cycle(background), stop)
        try:
            yield steps
        finally:
            stop.set()
        streaming.result()


def beside_prefills(
    prefiller: Client,
    sides: Sequence[Sides],
    prompts: Sequence[str],
    call: Callable[[Sides, str, Prefilled], T],
    *,
    offer: bool,
) -> list[T]:
    """Prefill ``prompts`` without a pause; ``call`` each while the next one is prefilled."""
    free: queue.SimpleQueue[Sides] = queue.SimpleQueue()
    for one in sides:
        free.put(one)

    def run(prompt: str, prefilled: Prefilled) -> T:
        one = free.get()
        try:
            return call(one, prompt, prefilled)
        finally:
            free.put(one)

    with ThreadPoolExecutor(len(sides)) as pool:
        running = [
            pool.submit(run, prompt, prefiller.prefill(prompt, offer=offer)) for prompt in prompts
        ]
        return [one.result() for one in running]


def _stream_into(
    steps: Steps, client: Client, background: Iterable[str], stop: threading.Event
) -> None:
    """Add the gaps of one stream after the other, until all were or ``stop`` is set."""
    for prompt in background:
        if stop.is_set():
            return
        steps.gaps += _gaps(client.stream(prompt, BACKGROUND_TOKENS, with_tokens=True, until=stop))


def _gaps(streamed: Streamed) -> list[tuple[float, float]]:
    """Tokens that came together share the time since the last ones evenly."""
    gaps = []
    arrivals = zip(streamed.at_s, streamed.at_s[1:], streamed.tokens[1:], strict=False)
    for before_s, at_s, tokens in arrivals:
        each_s = (at_s - before_s) / max(1, len(tokens))
        ends = [before_s + each_s * n for n in range(len(tokens) + 1)]
        gaps += list(itertools.pairwise(ends))
    return gaps
