"""Lines that strangers can cause, so many a second and no more.

Refuses the rest, and says once how many lines were left out.
"""

import asyncio
from collections import Counter

import structlog

log = structlog.get_logger()

WINDOW_S = 1.0
_SHARE = 4


class LimitedLog:
    """At most ``lines_s`` lines a second, and a quarter of them about the same one.

    Made and used in a running event loop.
    """

    def __init__(self, *, lines_s: int) -> None:
        self._loop, self._lines_s = asyncio.get_running_loop(), lines_s
        self._window_ends = 0.0
        self._num_by_who: Counter[str] = Counter()
        self._num_lines = self._num_left_out = 0

    def warning(self, event: str, *, who: str, **fields: object) -> None:
        """Log a warning about ``who``, as far as there is room."""
        self.write(event, who=who, level="warning", **fields)

    def write(self, event: str, *, who: str, level: str, **fields: object) -> None:
        """Log an event about ``who`` at ``level``, as far as there is room."""
        if self._loop.time() >= self._window_ends:
            self._open_window()
        most_of_one = max(1, self._lines_s // _SHARE)
        if self._num_lines >= self._lines_s or self._num_by_who[who] >= most_of_one:
            self._leave_out()
            return
        self._num_lines += 1
        self._num_by_who[who] += 1
        getattr(log, level)(event, **fields)

    def _open_window(self) -> None:
        self._window_ends = self._loop.time() + WINDOW_S
        self._num_by_who.clear()
        self._num_lines = 0

    def _leave_out(self) -> None:
        self._num_left_out += 1
        if self._num_left_out == 1:
            self._loop.call_at(self._window_ends, self._tell_left_out)

    def _tell_left_out(self) -> None:
        log.warning("lines.left_out", num_lines=self._num_left_out)
        self._num_left_out = 0
