"""The story of one entry of a table: its last events, and what each of them led to.

Refuses to keep what events and commands carry, but for the text of an error: a story must not keep
block tables, requests or tracebacks alive.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

MAX_STEPS = 32
Step = tuple[float, str, type[Any], str, tuple[type[Any], ...], str]


class Story:
    """The last `MAX_STEPS` steps, oldest first."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=MAX_STEPS)

    def note(
        self, now: float, event: object, state: str, commands: Sequence[object], about: str = ""
    ) -> None:
        """``event`` came at ``now``, left ``state``, and led to ``commands``."""
        error = getattr(event, "error", None)
        text = "" if error is None else f"{error.code}: {error.message}"
        kinds = tuple(map(type, commands))
        self._steps.append((now, about, type(event), state, kinds, text))

    def lines(self) -> Iterator[str]:
        """A line for each step; its time counts from the first that is kept."""
        started_at = self._steps[0][0] if self._steps else 0.0
        for now, about, event, state, commands, error in self._steps:
            led_to = ", ".join(kind.__name__ for kind in commands) or "-"
            what = f"{about} {event.__name__}".lstrip() + (f" ({error})" if error else "")
            yield f"+{now - started_at:.6f} s  {what} -> {state}: {led_to}"
