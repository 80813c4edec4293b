"""Whether what an agent has grows with its handoffs: a line through samples, and limits.

What is kept up to a known bound is taken off: that growth is not a leak.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIB = 1 << 20
FULL = 0.98
"""Of the most that was ever kept: as much as that, and the bounds are reached."""
SHARE_OF_WARM_UP = 1 / 3
"""With full caches, too, an allocator takes more until all that is kept was replaced once."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What both processes of an agent have while nothing is on its way.

    ``num_handoffs`` and ``num_restarts``, of its data process, are since its start.
    """

    num_handoffs: int
    anonymous_bytes: int
    num_descriptors: int
    num_threads: int
    num_mappings: int
    num_restarts: int = 0
    ended_bytes: int = 0
    """What is kept on purpose of handoffs that have ended, up to a bound."""

    @property
    def other_bytes(self) -> int:
        """Memory beside that, about: the agent estimates what it keeps."""
        return self.anonymous_bytes - self.ended_bytes


@dataclass(frozen=True, slots=True)
class Limit:
    """Growth is too much when it is more than both: by handoff, and over all that is judged."""

    by_handoff: float
    in_all: float


# Memory is noisy: an allocator keeps pages for later, by the MiB. The rest is counted while nothing
# is on its way, and may only change as pools of threads and arenas of memory do.
LIMITS = {
    "other_bytes": Limit(64, 8 * MIB),
    "num_descriptors": Limit(0, 4),
    "num_threads": Limit(0, 4),
    "num_mappings": Limit(0, 32),
    "num_restarts": Limit(0, 0.5),
}
WHILE_FILLING = LIMITS | {"other_bytes": Limit(512, 8 * MIB)}
"""As rough as the estimate."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one agent; ``grows`` has what is over its limit, and is empty when it is flat."""

    are_caps_full: bool
    num_judged: int
    num_handoffs: int
    bytes_by_handoff: float
    grows: Mapping[str, float]


def judge(samples: Sequence[Sample]) -> Verdict:
    """Judge the samples after the warm-up: at least half of them."""
    full_at = _full_at(samples)
    are_caps_full = full_at <= len(samples) // 2
    first = max(full_at if are_caps_full else 0, int(SHARE_OF_WARM_UP * len(samples)))
    judged = samples[first:]
    limits = LIMITS if are_caps_full else WHILE_FILLING
    slopes = {name: _slope(judged, name) for name in limits}
    num_handoffs = judged[-1].num_handoffs - judged[0].num_handoffs
    return Verdict(
        are_caps_full=are_caps_full,
        num_judged=len(judged),
        num_handoffs=num_handoffs,
        bytes_by_handoff=slopes["other_bytes"],
        grows={
            name: slope
            for name, slope in slopes.items()
            if slope > limits[name].by_handoff and slope * num_handoffs > limits[name].in_all
        },
    )


def _full_at(samples: Sequence[Sample]) -> int:
    """The first sample with as much kept as ever, nearly."""
    most = max(one.ended_bytes for one in samples)
    return next(at for at, one in enumerate(samples) if one.ended_bytes >= FULL * most)


def _slope(samples: Sequence[Sample], name: str) -> float:
    """By how much it grows with each handoff, by least squares; 0 when there was none."""
    handoffs = np.array([one.num_handoffs for one in samples], dtype=float)
    values = np.array([getattr(one, name) for one in samples], dtype=float)
    handoffs -= handoffs.mean()
    squares = float(handoffs @ handoffs)
    return float(handoffs @ (values - values.mean())) / squares if squares else 0.0
