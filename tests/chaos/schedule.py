"""What goes wrong, and when: drawn from a seed alone, so that a run can be had again."""

from dataclasses import dataclass
from random import Random

from tests.chaos.shapes import SHAPES

MEAN_GAP_S = 2.0
LONGEST_STOP_S = 15.0
AGENTS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LINKS = ("prefill-0", "prefill-1")
FABRICS = ("tcp", "shared memory")
DIGESTS = ("full", "full", "sampled", "off")


@dataclass(frozen=True)
class Kind:
    """How often a fault comes, to whom, and how long it lasts."""

    weight: int
    targets: tuple[str, ...]
    least_s: float = 0.0
    most_s: float = 0.0


ENGINES = tuple(shape.name for shape in SHAPES)
KINDS = {
    "kill_agent": Kind(2, AGENTS, 0.1, 1.5),
    "restart_agent": Kind(2, AGENTS),
    "replace_agent": Kind(3, AGENTS),
    "stop_agent": Kind(5, AGENTS, 0.05, LONGEST_STOP_S),
    "kill_engine": Kind(3, ENGINES),
    "stop_engine": Kind(3, ENGINES, 0.05, LONGEST_STOP_S),
    "cut": Kind(4, LINKS),
    "reset": Kind(3, LINKS),
    "take_down": Kind(2, LINKS, 0.2, 4.0),
    "blacken": Kind(3, LINKS, 0.2, 12.0),
    "delay": Kind(3, LINKS, 1.0, 5.0),
    "trickle": Kind(2, LINKS, 0.5, 4.0),
    "replay": Kind(3, LINKS),
    "burst": Kind(2, ("all",)),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong ``at_s`` into an act, for ``for_s``."""

    at_s: float
    kind: str
    target: str
    for_s: float


@dataclass(frozen=True)
class Setting:
    """What agents of one world have in common."""

    fabric: str
    keyed: bool
    maps: bool
    small_slices: bool
    digest: str


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
    )


def draw_faults(seed: int, act: int, seconds: float) -> list[Fault]:
    """In order of time; short ones are more frequent than long ones."""
    random = Random(f"{seed}/faults/{act}")
    weights = [kind.weight for kind in KINDS.values()]
    faults = []
    at_s = random.expovariate(1 / MEAN_GAP_S)
    while at_s < seconds:
        (name,) = random.choices(list(KINDS), weights)
        kind = KINDS[name]
        for_s = 0.0
        if kind.most_s:
            for_s = kind.least_s * (kind.most_s / kind.least_s) ** random.random()
        target = random.choice(kind.targets)
        faults.append(Fault(round(at_s, 3), name, target, round(for_s, 3)))
        at_s += random.expovariate(1 / MEAN_GAP_S)
    return faults
