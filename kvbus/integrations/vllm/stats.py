"""What became of loads and offers since vLLM last asked, for its logger and its metrics.

Recorded in the link's thread, taken in the scheduler's.
"""

from collections import deque

import msgspec

from kvbus.protocol.engine import Fetched, Outcome

LOADS = "loads"
LOAD_SECONDS = "load_seconds"
LOAD_BYTES = "load_bytes"
LOAD_STAGE_SECONDS = "load_stage_seconds"
LOADS_FAILED = "loads_failed"
OFFERS = "offers"
OFFERED_TOKENS = "offered_tokens"
OFFERS_FAILED = "offers_failed"
KEYS = (
    LOADS,
    LOAD_SECONDS,
    LOAD_BYTES,
    LOAD_STAGE_SECONDS,
    LOADS_FAILED,
    OFFERS,
    OFFERED_TOKENS,
    OFFERS_FAILED,
)

Reading = float | str | tuple[str, str, float]
Figures = dict[str, list[Reading]]


def no_figures() -> Figures:
    """Of every key, nothing."""
    return {key: [] for key in KEYS}


class StatsRecorder:
    """Readings by key, each taken once."""

    def __init__(self) -> None:
        self._readings: deque[tuple[str, Reading]] = deque()

    def add(self, key: str, reading: Reading) -> None:
        """One of `KEYS`. Of loads and offers their outcome, of a failed load the stage in which."""
        self._readings.append((key, reading))

    def add_load(self, notice: Fetched, *, given_up: bool = False) -> None:
        """A load has ended; ``given_up`` when vLLM did not want it any more before that."""
        outcome = Outcome.CANCELLED if given_up else notice.outcome
        self.add(LOADS, outcome.value)
        if outcome is Outcome.COMPLETED:
            self.add(LOAD_SECONDS, notice.stages_s.total)
            self.add(LOAD_BYTES, notice.num_bytes)
        elif outcome is Outcome.FAILED:
            self.add(LOADS_FAILED, notice.stage)
        for stage, spent_s in msgspec.structs.asdict(notice.stages_s).items():
            if spent_s > 0:
                self.add(LOAD_STAGE_SECONDS, (stage, outcome.value, spent_s))

    def add_refused_load(self, stage: str) -> None:
        """A load has failed before it was asked for."""
        self.add(LOADS, Outcome.FAILED.value)
        self.add(LOADS_FAILED, stage)

    def take(self) -> Figures | None:
        """All since the last call, None when there was nothing."""
        if not self._readings:
            return None
        figures = no_figures()
        for _ in range(len(self._readings)):
            key, reading = self._readings.popleft()
            figures[key].append(reading)
        return figures
