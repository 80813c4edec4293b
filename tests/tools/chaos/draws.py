"""Faults and handoffs of a chaos run, drawn from a seed alone.

Large handoffs are withdrawn or cancelled during the read; others have a second reader, an offer
that grows or lives for milliseconds, or an altered ticket. A rendezvous goes to both sides at once,
in any order, by a name in place of a ticket. Some requests are queued, and hold their offer until
they are fetched, or are cancelled before that. Some engines request that their offer is parked.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from tests.tools.chaos.shapes import AGENTS, LARGE_TOKENS, SHAPES

MEAN_GAP_S = 2.0
LONGEST_STOP_S = 15.0
LINKS = AGENTS[:2]
FABRICS = ("tcp", "shared memory")
DIGESTS = ("full", "full", "sampled", "off")
PARK_AFTER_S = (0.0, 0.2, 3600.0)
"""At once, during a read on any machine, or only on request."""


@dataclass(frozen=True)
class Kind:
    weight: int
    targets: tuple[str, ...]
    least_s: float = 0.0
    most_s: float = 0.0


ENGINES = tuple(shape.name for shape in SHAPES)
KINDS = {
    "kill_agent": Kind(2, AGENTS, 0.1, 1.5),
    "restart_agent": Kind(5, AGENTS),
    "stop_agent": Kind(5, AGENTS, 0.05, LONGEST_STOP_S),
    "kill_data": Kind(2, AGENTS),
    "abort_data": Kind(1, AGENTS),
    "kill_engine": Kind(3, ENGINES),
    "stop_engine": Kind(3, ENGINES, 0.05, LONGEST_STOP_S),
    "cut": Kind(4, LINKS),
    "reset": Kind(3, LINKS),
    "take_down": Kind(2, LINKS, 0.2, 4.0),
    "blacken": Kind(3, LINKS, 0.2, 12.0),
    "delay": Kind(3, LINKS, 1.0, 5.0),
    "trickle": Kind(2, LINKS, 0.5, 4.0),
    "burst": Kind(2, ("all",)),
}


@dataclass(frozen=True)
class Fault:
    """One fault, ``at_s`` into an act, for ``for_s``."""

    at_s: float
    kind: str
    target: str
    for_s: float


@dataclass(frozen=True)
class Setting:
    fabric: str
    keyed: bool
    maps: bool
    small_slices: bool
    digest: str
    park_after_s: float = PARK_AFTER_S[1]


def draw_setting(seed: int, world: int) -> Setting:
    """The first world is always the same kind: it is all that a short run sees."""
    if world == 0:
        return Setting("tcp", keyed=False, maps=True, small_slices=True, digest="off")
    random = Random(f"{seed}/setting/{world}")
    return Setting(
        random.choice(FABRICS),
        keyed=random.random() < 0.5,
        maps=random.random() < 0.7,
        small_slices=random.random() < 0.5,
        digest=random.choice(DIGESTS),
        park_after_s=random.choice(PARK_AFTER_S),
    )


def draw_faults(seed: int, act: int, seconds: float) -> list[Fault]:
    random = Random(f"{seed}/faults/{act}")
    weights = [kind.weight for kind in KINDS.values()]
    faults = []
    at_s = random.expovariate(1 / MEAN_GAP_S)
    while at_s < seconds:
        (name,) = random.choices(list(KINDS), weights)
        kind = KINDS[name]
        for_s = _short(random, kind.least_s, kind.most_s) if kind.most_s else 0.0
        target = random.choice(kind.targets)
        faults.append(Fault(round(at_s, 3), name, target, round(for_s, 3)))
        at_s += random.expovariate(1 / MEAN_GAP_S)
    return faults


HANDOFFS = {
    "plain": 30,
    "large": 8,
    "withdrawn": 16,
    "cancelled": 14,
    "second_reader": 6,
    "short_lived": 5,
    "growing": 9,
    "altered": 12,
    "forged": 2,
    "partial": 5,
    "met": 8,
    "met_withdrawn": 4,
    "met_cancelled": 4,
    "held": 5,
    "held_cancelled": 2,
    "met_held": 2,
    "forged_held": 1,
}
TTLS_S = {"short_lived": (0.001, 0.2), "held": (2.0, 4.0), "held calmly": (8.0, 10.0)}
"""On a busy machine, a hold may take seconds to arrive."""
SMALL_TOKENS, LARGE = (2, 300), (LARGE_TOKENS // 2, LARGE_TOKENS)
TOKENS = {"large": LARGE, "withdrawn": LARGE, "cancelled": LARGE, "altered": (33, 80)}
"""Altered tickets have more than one block, and so few that they are read without an acquire."""
QUEUES_S, CALM_QUEUES_S = (0.5, 14.0), (13.0, 17.0)
"""Times before a fetch, beyond the offer's time to live and the first renewal: some, or all."""
SOONEST_S, LATEST_S = 0.002, 1.0
"""A handoff is withdrawn or cancelled after this time: during a read on any machine."""


@dataclass(frozen=True)
class Draw:
    kind: str
    num_tokens: int
    first_token: int
    ttl_s: float
    timeout_s: float
    act_after_s: float
    queue_s: float
    parks: bool
    releases: bool
    zero_tail: bool
    piece_tokens: int
    steps: tuple[int, ...]

    def order(self) -> dict[str, Any]:
        return {"do": "offer", "steps": self.steps, "ttl_s": self.ttl_s, "parks": self.parks}

    @property
    def is_met(self) -> bool:
        return self.kind.startswith("met")

    @property
    def is_forged(self) -> bool:
        return self.kind.startswith("forged")

    @property
    def is_held(self) -> bool:
        return self.queue_s > 0 and not self.is_forged

    @property
    def is_withdrawn(self) -> bool:
        return self.kind.endswith("withdrawn")

    @property
    def is_cancelled(self) -> bool:
        return self.kind.endswith("cancelled")


def draw_handoff(random: Random, *, hurts: bool = True) -> Draw:
    (kind,) = random.choices(list(HANDOFFS), list(HANDOFFS.values()))
    tokens = random.randint(*TOKENS.get(kind, SMALL_TOKENS))
    steps: tuple[int, ...] = (tokens,)
    if kind == "growing" or kind.startswith("met"):
        steps = (*sorted(random.sample(range(1, tokens), min(3, tokens - 1))), tokens)
    is_queued, held, queues_s = "held" in kind, "held calmly", CALM_QUEUES_S
    if hurts:
        held, queues_s = "held", QUEUES_S
    return Draw(
        kind=kind,
        num_tokens=tokens,
        first_token=random.randrange(tokens) if kind == "partial" else 0,
        ttl_s=random.uniform(*TTLS_S.get(held if is_queued else kind, (4.0, 10.0))),
        timeout_s=random.choice([3.0, 6.0, 10.0]),
        act_after_s=_short(random, SOONEST_S, LATEST_S),
        queue_s=_short(random, *queues_s) if is_queued else 0.0,
        parks=random.random() < 0.3,
        releases=random.random() < 0.5,
        zero_tail=random.random() < 0.3,
        piece_tokens=random.choice([0, 0, 128]),
        steps=steps,
    )


def _short(random: Random, least_s: float, most_s: float) -> float:
    return float(least_s * (most_s / least_s) ** random.random())
