"""For how long a process could not do anything, which nobody may hold against it."""

import time


class Stops:
    """Times of one process in which it was stopped."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._since: float | None = None

    @property
    def is_stopped(self) -> bool:
        return self._since is not None

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        if self._since is not None:
            self._spans.append((self._since, time.monotonic()))
            self._since = None

    def add(self, start: float, stop: float) -> None:
        """A time that was seen afterwards."""
        self._spans.append((start, stop))

    def lost_s(self, since: float) -> float:
        """How much of the time from ``since`` until now is lost."""
        now = time.monotonic()
        spans = [*self._spans, (self._since, now)] if self._since is not None else self._spans
        return sum(max(0.0, stop - max(start, since)) for start, stop in spans)
