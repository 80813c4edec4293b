"""Numbers of the scheduler's steps: each worker records them behind the work of the step.

scheduler   step 7 ─▶ metadata    offer, after 7 · fetch, after 7
worker                forward, drafts, record(7)
GPU                   ───────── work of 7 ─────────▶ 7 is written: agents begin
"""

from collections.abc import Iterable

from kvbus.engine import PageName, PageView
from kvbus.protocol.engine import NUM_SEQUENCE_WORDS


class Steps:
    """Steps are numbered from 1. All numbers are in one word: they ascend in one stream."""

    def __init__(self) -> None:
        self.latest = 0
        self._views: list[PageView] = []
        self._is_watching = False
        self._ended = 0

    def begin(self) -> int:
        """Return the number of the next step."""
        self.latest += 1
        return self.latest * NUM_SEQUENCE_WORDS

    def watch(self, pages: Iterable[PageName]) -> None:
        """Read the workers' pages, unless one of them is on another machine."""
        views = [PageView.open(page) for page in pages]
        self._views = [view for view in views if view is not None]
        self._is_watching = bool(views) and len(self._views) == len(views)

    def after(self, step: int) -> int:
        """Return the number to wait for, or 0 if the work of ``step`` is known to have ended."""
        number = step * NUM_SEQUENCE_WORDS
        if self._is_watching and number > self._ended:
            self._ended = min(view[0] for view in self._views)
        return number if number > self._ended else 0
