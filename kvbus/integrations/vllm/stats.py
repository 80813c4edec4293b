"""What became of loads and offers since vLLM last asked, for its logger and its metrics.

Recorded in the link's thread, taken in the scheduler's.
"""

from collections import deque

from kvbus.protocol.engine import Fetched

LOAD_SECONDS = "load_seconds"
LOAD_BYTES = "load_bytes"
LOADS_FAILED = "loads_failed"
OFFERED_TOKENS = "offered_tokens"
OFFERS_FAILED = "offers_failed"
KEYS = (LOAD_SECONDS, LOAD_BYTES, LOADS_FAILED, OFFERED_TOKENS, OFFERS_FAILED)

Figures = dict[str, list[float | int | str]]


def no_figures() -> Figures:
    """Of every key, nothing."""
    return {key: [] for key in KEYS}


class StatsRecorder:
    """Readings by key, each taken once."""

    def __init__(self) -> None:
        self._readings: deque[tuple[str, float | int | str]] = deque()

    def add(self, key: str, reading: float | str) -> None:
        """One of `KEYS`; of a failed load kvbus's error code."""
        self._readings.append((key, reading))

    def add_load(self, notice: Fetched) -> None:
        """A load was completed."""
        self.add(LOAD_SECONDS, notice.stages_s.total)
        self.add(LOAD_BYTES, notice.num_bytes)

    def take(self) -> Figures | None:
        """All since the last call, None when there was nothing."""
        if not self._readings:
            return None
        figures = no_figures()
        for _ in range(len(self._readings)):
            key, reading = self._readings.popleft()
            figures[key].append(reading)
        return figures
