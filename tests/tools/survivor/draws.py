"""Events of a survivor run, drawn from a seed."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from random import Random

PREFILL, DECODE = "prefill", "decode"
BOTH = (PREFILL, DECODE)
OVERLAPS = 0.25
"""Share of events that do not wait until the cluster has recovered from the one before."""
MEAN_GAP_S = 0.2
MOST_RESTART_S = 0.5


@dataclass(frozen=True)
class Kind:
    """The weight of an event, the agents that it can hit, and its duration."""

    weight: int
    roles: tuple[str, ...] = BOTH
    least_s: float = 0.0
    most_s: float = 0.0


KINDS = {
    "reset": Kind(16),
    "kill_data": Kind(14),
    "abort_data": Kind(10),
    "stop_data": Kind(8, least_s=1.0, most_s=20.0),
    "kill_agent": Kind(20, most_s=MOST_RESTART_S),
    "move_agent": Kind(8, (PREFILL,), most_s=MOST_RESTART_S),
    "cut": Kind(12, least_s=0.2, most_s=5.0),
}
"""For `kill_agent` and `move_agent` the time is how long the supervisor waits before a restart."""


@dataclass(frozen=True)
class Event:
    """One event at one agent of a cluster; ``gap_s`` follows it."""

    kind: str
    role: str
    for_s: float
    gap_s: float
    overlaps: bool


def draw_events(seed: str, kinds: Collection[str]) -> Iterator[Event]:
    """Yield events of these kinds without end."""
    random = Random(seed)
    names = [name for name in KINDS if name in kinds]
    weights = [KINDS[name].weight for name in names]
    while True:
        (name,) = random.choices(names, weights)
        kind = KINDS[name]
        yield Event(
            kind=name,
            role=random.choice(kind.roles),
            for_s=_draw_s(random, kind),
            gap_s=random.expovariate(1 / MEAN_GAP_S),
            overlaps=random.random() < OVERLAPS,
        )


def _draw_s(random: Random, kind: Kind) -> float:
    """Short times are more frequent: from 1 to 20 s the mean is 3.2 s."""
    if not kind.least_s:
        return random.uniform(0.0, kind.most_s)
    at = random.random()
    return 1 / ((1 - at) / kind.least_s + at / kind.most_s)
