"""Progress of a long command: bars on stderr while that is a terminal, else nothing."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from kvbus.console import Console
from kvbus.output import waits_shown_by

REFRESH_S = 0.5
SECONDS = "s"
WHOLE_RUN_S = 3600.0
"""Time left is estimated by the mean speed of so long."""


class Progress:
    """Steps of a command, and the parts of the current step, on a line each.

    Without ``in_background`` no thread draws, so that a process can measure between two calls.
    """

    def __init__(self, total: int, unit: str = "", *, in_background: bool = True) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bars = _bars(disable=not is_terminal, auto_refresh=in_background)
        self._steps = self._bars.add_task("", total=total, unit=unit)
        self._parts = self._bars.add_task("", total=None, unit="", visible=False)
        self._in_background, self._drawn_s = in_background, 0.0
        self._num_ended, self._is_begun = 0, False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if not self._bars.disable:
            self._stack.enter_context(self._bars)
            self._stack.enter_context(waits_shown_by(self.note))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def expect(self, total: int) -> None:
        self._bars.update(self._steps, total=total)

    def begin(self, text: str) -> None:
        """Begin a step, after the end of the one before."""
        if self._is_begun:
            self.advance()
        self._is_begun = True
        self.note(text)

    def note(self, text: str) -> None:
        """Show what is in progress."""
        self._bars.update(self._steps, description=text, refresh=not self._in_background)

    def advance(self) -> None:
        """End a step; several may be in progress."""
        self._num_ended += 1
        self._bars.update(self._steps, completed=self._num_ended)
        self._bars.update(self._parts, visible=False)
        self._draw()

    def parts(self, number: int, unit: str) -> Iterator[int]:
        """Yield the numbers of this step's parts, which end one after another."""
        self._bars.reset(self._parts, total=number, visible=True, unit=unit)
        for done in range(number):
            yield done
            self._bars.update(self._parts, completed=done + 1)
            self._bars.update(self._steps, completed=self._num_ended + (done + 1) / number)
            self._draw()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Leave the terminal to other output."""
        if self._bars.live.is_started:
            self._bars.stop()
            yield
            self._bars.start()
        else:
            yield

    def _draw(self) -> None:
        """Draw seldom: that takes about 2 ms."""
        if not self._in_background and time.monotonic() >= self._drawn_s + REFRESH_S:
            self._drawn_s = time.monotonic()
            self._bars.refresh()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        if not task.speed or unit in ("", SECONDS):
            return Text()
        rate = f"{task.speed:,.0f}" if task.speed >= 100 else f"{task.speed:.3g}"
        return Text(f"{rate} {unit}/s", style="progress.data.speed")


def _bars(*, disable: bool, auto_refresh: bool) -> Bars:
    return Bars(
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        auto_refresh=auto_refresh,
        refresh_per_second=1 / REFRESH_S,
        speed_estimate_period=WHOLE_RUN_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        expand=True,
        disable=disable,
    )
