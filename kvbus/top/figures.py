"""Rates and spreads of what happened between two looks at an agent.

Refuses to guess: what was not observed is None.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvbus.histograms import added_counts, histogram_quantile
from kvbus.protocol.status import Live

Samples = Mapping[str, float]

_LE = re.compile(r'le="([^"]+)"')
_STAGE = re.compile(r'kvbus_stage_seconds_count\{stage="([^"]+)"\}')


@dataclass(frozen=True, slots=True)
class Spread:
    """The half and the hundredth that took longest, in seconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Between:
    """Two looks at one process; ``before`` is None at the first one."""

    now: Live
    before: Live | None = None

    @property
    def seconds(self) -> float | None:
        """How long it is between them, 0 if the agent told the same twice.

        None when the agent is another process since.
        """
        if self.before is None or self.now.boot != self.before.boot:
            return None
        return self.now.now_s - self.before.now_s

    def rate(self, name: str, **labels: str) -> float | None:
        """How much a counter grew, a second, over all labels that are not given."""
        seconds = self.seconds
        if not seconds or self.before is None or not _has(self.now.metrics, name):
            return None
        gained = total(self.now.metrics, name, **labels) - total(
            self.before.metrics, name, **labels
        )
        return max(0.0, gained) / seconds

    def spread(self, name: str, **labels: str) -> Spread | None:
        """Of what a histogram observed between them, or ever, where there is one look only."""
        counts = _buckets(self.now.metrics, name, labels)
        if self.before is not None and self.seconds is not None:
            counts = added_counts(_buckets(self.before.metrics, name, labels), counts)
        p50, p99 = (histogram_quantile(counts, part) for part in (0.5, 0.99))
        return None if math.isnan(p50) else Spread(p50, p99)

    @property
    def stages(self) -> list[str]:
        """The stages of handoffs that the agent has seen, in the order of its page."""
        found = (_STAGE.fullmatch(key) for key in self.now.metrics)
        return [one[1] for one in found if one]


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels."""
    return sum(value for _, value in _of(samples, name, labels))


def _has(samples: Samples, name: str) -> bool:
    return any(key.partition("{")[0] == name for key in samples)


def _buckets(samples: Samples, name: str, labels: Mapping[str, str]) -> dict[float, float]:
    """Counts by upper bound, over all labels that are not given."""
    found: dict[float, float] = {}
    for key, value in _of(samples, f"{name}_bucket", labels):
        if bound := _LE.search(key):
            found[float(bound[1])] = found.get(float(bound[1]), 0.0) + value
    return found


def _of(samples: Samples, name: str, labels: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    for key, value in samples.items():
        if (key == name or key.startswith(f"{name}{{")) and all(one in key for one in wanted):
            yield key, value
