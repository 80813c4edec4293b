"""Engine steps while KV moves: the gaps in a steady stream, and prefills one after the other.

Refuses to look into an engine: a step is what a client sees of it.
"""

import itertools
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .client import Client, Prefilled, Streamed
from .handovers import Handed, Sides

BACKGROUND_PROMPT_TOKENS, BACKGROUND_TOKENS = 32, 256


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
        spans = [(one.received_s, one.first_token_s) for one in self.handed]
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


def steps_beside_handovers(
    client: Client,
    background: Sequence[str],
    prefiller: Client,
    sides: Sequence[Sides],
    prompts: Sequence[str],
    *,
    offer: bool,
) -> Steps:
    """The stream while prompts are prefilled without a pause, and moved while the next one is."""
    steps, stop = Steps(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(_stream_into, steps, client, itertools.cycle(background), stop)
        try:
            steps.handed = _pipeline(prefiller, sides, prompts, offer=offer)
        finally:
            stop.set()
        streaming.result()
    return steps


def _pipeline(
    prefiller: Client, sides: Sequence[Sides], prompts: Sequence[str], *, offer: bool
) -> list[Handed]:
    free: queue.SimpleQueue[Sides] = queue.SimpleQueue()
    for one in sides:
        free.put(one)

    def finish(prompt: str, prefilled: Prefilled) -> Handed:
        one = free.get()
        try:
            return one.finish(prompt, prefilled)
        finally:
            free.put(one)

    with ThreadPoolExecutor(len(sides)) as pool:
        moving = [
            pool.submit(finish, prompt, prefiller.prefill(prompt, offer=offer))
            for prompt in prompts
        ]
        return [one.result() for one in moving]


def _stream_into(
    steps: Steps, client: Client, background: Iterable[str], stop: threading.Event
) -> None:
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
