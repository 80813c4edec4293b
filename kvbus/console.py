"""rich's console for commands: no markup or emoji, and unprintable characters are escaped."""

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
    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> None:
        write_text(text)

    def flush(self) -> None:
        """`write_text` flushes."""


class Console(console.Console):
    def __init__(self, **options: Any) -> None:
        options = {"file": _Stdout(), **options}
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape first, as an escape is wider than its character."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def text_of(*parts: RenderableType) -> str:
    """Render as the terminal would, without trailing blanks; strings are not wrapped."""
    shown = Console()
    with shown.capture() as printed:
        for part in parts:
            shown.print(part, soft_wrap=isinstance(part, str))
    return "".join(f"{line.rstrip()}\n" for line in printed.get().splitlines())
