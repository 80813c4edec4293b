"""Colours the architecture for light and dark pages: ``docs/pictures/architecture-*.svg``."""

from pathlib import Path
from string import Template

PICTURES = Path(__file__).parent / "pictures"
THEMES = {
    "light": {
        "ink": "#1f2328", "muted": "#59636e", "line": "#8c959f", "host": "#f6f8fa",
        "engine": "#ffffff", "agent": "#dff3e4", "agent_line": "#1a7f37", "data": "#bc4c00",
    },
    "dark": {
        "ink": "#e6edf3", "muted": "#9198a1", "line": "#656c76", "host": "#151b23",
        "engine": "#0d1117", "agent": "#12351f", "agent_line": "#3fb950", "data": "#f0883e",
    },
}  # fmt: skip


def pictures() -> dict[Path, str]:
    """Return the picture for each theme, by its file."""
    drawing = Template((PICTURES / "architecture.svg.in").read_text(encoding="utf-8"))
    return {
        PICTURES / f"architecture-{theme}.svg": drawing.substitute(colours)
        for theme, colours in THEMES.items()
    }


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
