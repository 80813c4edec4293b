"""What commands print tables and lines with: rich's console, for text that others have chosen.

No markup or emoji name is read in it, and what is not printable is escaped.
"""

import sys
from collections.abc import Iterator
from typing import Any

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kvbus.output import write_text
from kvbus.text import printable


class _Stdout:
    """`write_text` as the file that rich writes to; of all else, what stdout is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> None:
        write_text(text)

    def flush(self) -> None:
        """Nothing is left to write."""


class Console(console.Console):
    """rich's console without highlighting, markup and emoji names, with `printable` text."""

    def __init__(self, **options: Any) -> None:
        options = {"file": _Stdout(), **options}
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A cell is as wide as what is printed of it: an escape is longer than its character."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """All that is printed comes by here, also what is no string."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def text_of(*parts: RenderableType) -> str:
    """What the terminal would show of these, without blanks at ends of lines; text is not wrapped.

    For `kvbus.output.write_text`, which lets a reader of a pipe end.
    """
    shown = Console()
    with shown.capture() as printed:
        for part in parts:
            shown.print(part, soft_wrap=isinstance(part, str))
    return "".join(f"{line.rstrip()}\n" for line in printed.get().splitlines())
