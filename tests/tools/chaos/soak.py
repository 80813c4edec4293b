"""Whether agents grow with their handoffs: samples, a line through them, and limits."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agents import AgentProcess

CAPS: Mapping[str, dict[str, Any]] = {"small": {"max_ended_bytes": 1 << 20}, "default": {}}
"""How much the agents keep of what has ended: the least that they accept, or the default."""
LONGEST_PERIOD_S, NUM_PERIODS = 60.0, 10
MIB = 1 << 20
FULL = 0.98
"""Share of the most that was ever kept, from which on the bounds are reached."""
SHARE_OF_WARM_UP = 1 / 3
"""With full caches, too, an allocator grows until all that is kept was replaced once."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What both processes of an agent have while nothing is in flight.

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


# Growth is too much when it is over both limits: for each handoff, and over all that is judged.
# Memory is noisy: an allocator keeps pages for later, by the MiB. The rest is counted while nothing
# is in flight, and may only change as pools of threads and arenas of memory do.
LIMITS = {
    "other_bytes": (64, 8 * MIB),
    "num_descriptors": (0, 4),
    "num_threads": (0, 4),
    "num_mappings": (0, 32),
    "num_restarts": (0, 0.5),
}
WHILE_FILLING = LIMITS | {"other_bytes": (512, 8 * MIB)}
"""As rough as the estimate."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one agent; ``grows`` has what is over its limit."""

    are_caps_full: bool
    num_judged: int
    num_handoffs: int
    bytes_by_handoff: float
    grows: Mapping[str, float]


def judge(samples: Sequence[Sample]) -> Verdict:
    """Judge the samples after the warm-up: at least half of them."""
    most = max(one.ended_bytes for one in samples)
    full_at = next(at for at, one in enumerate(samples) if one.ended_bytes >= FULL * most)
    are_caps_full = full_at <= len(samples) // 2
    judged = samples[max(full_at if are_caps_full else 0, int(SHARE_OF_WARM_UP * len(samples))) :]
    limits = LIMITS if are_caps_full else WHILE_FILLING
    slopes = {name: _slope(judged, name) for name in limits}
    num_handoffs = judged[-1].num_handoffs - judged[0].num_handoffs
    grows = {
        name: slopes[name]
        for name, (by_handoff, in_all) in limits.items()
        if slopes[name] > by_handoff and slopes[name] * num_handoffs > in_all
    }
    return Verdict(are_caps_full, len(judged), num_handoffs, slopes["other_bytes"], grows)


def _slope(samples: Sequence[Sample], name: str) -> float:
    """By how much it grows with each handoff, by least squares; 0 when there was none."""
    handoffs = np.array([one.num_handoffs for one in samples], dtype=float)
    values = np.array([getattr(one, name) for one in samples], dtype=float)
    handoffs -= handoffs.mean()
    squares = float(handoffs @ handoffs)
    return float(handoffs @ (values - values.mean())) / squares if squares else 0.0


def sample(agent: AgentProcess) -> Sample:
    metrics = Counter[str]()
    for family in text_string_to_metric_families(agent.page("/metrics")[1]):
        for one in family.samples:
            metrics[one.name.removeprefix("kvbus_")] += round(one.value)
    processes = [Path(f"/proc/{pid}") for pid in filter(None, (agent.pid, agent.data_pid))]
    maps = [(one / "maps").read_text(errors="replace") for one in processes]
    return Sample(
        num_handoffs=metrics["handoffs_total"] or metrics["offers_total"],
        anonymous_bytes=sum(map(_anonymous_bytes, processes)),
        num_descriptors=sum(len(list((one / "fd").iterdir())) for one in processes),
        num_threads=sum(len(list((one / "task").iterdir())) for one in processes),
        num_mappings=sum(len(text.splitlines()) for text in maps),
        num_restarts=metrics["data_restarts"],
        ended_bytes=metrics["ended_bytes"],
    )


def _anonymous_bytes(process: Path) -> int:
    """Memory that is neither a file's nor another process's as well."""
    found = re.search(r"(?m)^Anonymous:\s+(\d+) kB$", (process / "smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) * 1024
