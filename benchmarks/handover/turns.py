"""What moving KV costs a step: requests of one length on the same servers, moved and cached.

Refuses to compare servers that ran at different times, as on a small machine their steps differ by
more than what is looked for: the two kinds take turns.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .client import Client, Prefilled
from .handovers import Handed, Sides
from .processes import Group
from .steps import Steps, beside_prefills, steps_beside

WAVE, PACE_S = 16, 0.2
"""Requests of each turn, and the time from one load to the next."""
SETTLE_S = 0.5
"""A server has answered before its connector has told its agent of the last tokens."""

T = TypeVar("T")


@dataclass(slots=True)
class Turns(Generic[T]):
    """What was measured in each turn while KV was moved, and in each while it was cached."""

    moved: list[T] = field(default_factory=list)
    cached: list[T] = field(default_factory=list)

    def take(self, move: Callable[[], T], hit: Callable[[], T], *, moved_first: bool) -> None:
        """One turn of each."""
        if moved_first:
            self.moved.append(move())
        self.cached.append(hit())
        if not moved_first:
            self.moved.append(move())


def decode_steps(
    client: Client,
    background: Sequence[str],
    prefiller: Client,
    side: Sides,
    prompts: Sequence[str],
    *,
    server: Group,
) -> Turns[Steps]:
    """Of a stream beside loads at a fixed pace.

    ``server``, which prefilled the prompts, is stopped meanwhile, as if it were elsewhere: vLLM
    polls while blocks wait for their reader.
    """
    turns: Turns[Steps] = Turns()
    for wave, moved_first in _waves(prompts):
        for _ in wave:
            side.local_hit_s()  # what was moved before may have driven the cached prompts out
        prefilled = [(prompt, prefiller.prefill(prompt, offer=True)) for prompt in wave]

        def move(prefilled: Sequence[tuple[str, Prefilled]] = prefilled) -> Steps:
            loads = [lambda each=each: side.finish(*each) for each in prefilled]
            return _beside(client, background, loads)

        def hit(number: int = len(wave)) -> Steps:
            return _beside(client, background, [side.local_hit_s] * number)

        time.sleep(SETTLE_S)
        with server.stopped():
            turns.take(move, hit, moved_first=moved_first)
    return turns


def prefills(
    prefiller: Client, sides: Sequence[Sides], prompts: Sequence[str]
) -> Turns[list[float]]:
    """Seconds of prompts prefilled without a pause, while what was prefilled before is moved."""
    turns: Turns[list[float]] = Turns()
    for wave, moved_first in _waves(prompts):
        half = len(wave) // 2

        def move(prompts: Sequence[str] = wave[:half]) -> list[float]:
            moved = beside_prefills(prefiller, sides, prompts, Sides.finish, offer=True)
            return [one.prefill_s for one in moved[1:]]

        def hit(prompts: Sequence[str] = wave[half:]) -> list[float]:
            def find_cached(side: Sides, _: str, prefilled: Prefilled) -> float:
                side.local_hit_s()
                return prefilled.received_s - prefilled.sent_s

            return beside_prefills(prefiller, sides, prompts, find_cached, offer=False)[1:]

        turns.take(move, hit, moved_first=moved_first)
    return turns


def _waves(prompts: Sequence[str]) -> Iterator[tuple[Sequence[str], bool]]:
    for number, start in enumerate(range(0, len(prompts), WAVE)):
        yield prompts[start : start + WAVE], number % 2 == 0


def _beside(
    client: Client, background: Sequence[str], loads: Sequence[Callable[[], object]]
) -> Steps:
    """The stream's steps from the first of ``loads`` to the end of the last one."""
    with steps_beside(client, background) as steps:
        begin_s = time.perf_counter()
        for number, load in enumerate(loads, start=1):
            time.sleep(max(0.0, begin_s + number * PACE_S - time.perf_counter()))
            sent_s = time.perf_counter()
            load()
            steps.handed.append(Handed(0.0, sent_s, time.perf_counter()))
    return steps
