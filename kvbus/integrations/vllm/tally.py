"""What became of loads and offers since vLLM last asked, for its logger and its metrics.

Refuses to aggregate over time: that is vLLM's. Written in the link's thread, taken in the
scheduler's.
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


class Tally:
    """Counts; each reading is there once."""

    def __init__(self) -> None:
        self._readings: deque[tuple[str, float | int | str]] = deque()

    def loaded(self, notice: Fetched) -> None:
        """A load was completed."""
        times = notice.stages_s
        seconds = (
            times.resolving + times.claiming + times.waiting + times.reading + times.confirming
        )
        self._readings.append((LOAD_SECONDS, seconds))
        self._readings.append((LOAD_BYTES, notice.num_bytes))

    def load_failed(self, code: str) -> None:
        """A load failed; ``code`` is kvbus's error code."""
        self._readings.append((LOADS_FAILED, str(code)))

    def offered(self, num_tokens: int) -> None:
        """The KV of a request was offered."""
        self._readings.append((OFFERED_TOKENS, num_tokens))

    def offer_failed(self) -> None:
        """The KV of a request could not be offered."""
        self._readings.append((OFFERS_FAILED, 1))

    def take(self) -> Figures | None:
        """All since the last call, None when there was nothing."""
        if not self._readings:
            return None
        figures = no_figures()
        for _ in range(len(self._readings)):
            key, reading = self._readings.popleft()
            figures[key].append(reading)
        return figures
