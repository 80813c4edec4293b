"""Bar charts of figures, drawn by matplotlib, which is optional."""

import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from kvbus.bench.sheet import OF_UNIT, P50, TITLES, UNITS, label, stage_of
from kvbus.errors import ConfigError, KVBusError

KINDS = (".svg", ".png")
OURS, OTHERS = "#2f81f7", "#8b949e"
TEXT = {"any": "#808080", "light": "#1f2328", "dark": "#e6edf3"}
"""Colours of text by theme; ``any`` is readable on a light and on a dark ground."""
RELEASED = "offer to released"
DRAWN_UNITS = ("GB/s", "ms", *OF_UNIT)
WIDTH_INCHES, BAR_INCHES, TITLE_INCHES, CAPTION_INCHES = 10.0, 0.28, 0.45, 0.4
FONT_POINTS, TITLE_POINTS = 9, 10
CAPTION_COLUMNS, TITLE_COLUMNS = 150, 72


class Panel(NamedTuple):
    """Bars that are called kvbus stand out."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float]]


def check_plot(path: Path) -> None:
    """Raise `ConfigError` if ``path`` cannot be drawn, before the minutes of a measurement."""
    if path.suffix not in KINDS:
        raise ConfigError(f"--plot: {path} does not end in {' or '.join(KINDS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'kvbus[plot]'")
    try:
        if path.exists():
            with path.open("r+b"):
                return
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from error


def panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return one for each case and unit of the rows of ``kvbus bench --json``."""
    return list(_panels(rows))


def _panels(rows: Sequence[Mapping[str, Any]]) -> Iterator[Panel]:
    for case, of_case in groupby(rows, key=lambda row: row["case"]):
        found = list(of_case)
        moved = {row["name"] + P50 for row in found if row["unit"] == "GB/s"}
        for unit in DRAWN_UNITS:
            bars = [
                (label(row["name"]), row["value"])
                for row in found
                if row["unit"] == unit and row["name"] not in moved and not _is_part(row["name"])
            ]
            if bars:
                yield Panel(TITLES[case], UNITS.get(unit, unit) + OF_UNIT.get(unit, ""), bars)


def _is_part(name: str) -> bool:
    return bool(stage_of(name)) or name.startswith(RELEASED)


def draw(
    all_panels: Sequence[Panel],
    path: Path,
    *,
    theme: str = "any",
    columns: int = 2,
    caption: str = "",
) -> None:
    """Raises `KVBusError` if the file cannot be written."""
    from matplotlib import rc_context  # noqa: PLC0415 - optional, and slow
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [all_panels[at : at + columns] for at in range(0, len(all_panels), columns)]
    most_bars = [max(len(one.bars) for one in row) for row in rows]
    heights = [TITLE_INCHES + BAR_INCHES * number for number in most_bars]
    settings: Any = {"svg.hashsalt": "kvbus", "font.size": FONT_POINTS, "text.color": TEXT[theme]}
    with rc_context(settings):
        size = WIDTH_INCHES, sum(heights) + CAPTION_INCHES
        figure = Figure(size, layout="constrained")
        grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        for at, axes in enumerate(grid.flat):
            if at < len(all_panels):
                _draw_panel(axes, all_panels[at], TEXT[theme], TITLE_COLUMNS // columns)
                axes.set_ylim(most_bars[at // columns] - 0.5, -0.5)  # bars are equally thick
            else:
                axes.axis("off")
        text = textwrap.fill(caption.replace("\n", " "), CAPTION_COLUMNS)
        figure.supxlabel(text, fontsize=FONT_POINTS - 1, x=0, ha="left")
        try:
            figure.savefig(path, transparent=True, metadata=_undated(path))
        except OSError as error:
            raise KVBusError(f"cannot write {path}: {error.strerror}") from error


def _draw_panel(axes: Any, panel: Panel, text: str, title_columns: int) -> None:
    names, values = zip(*panel.bars, strict=True)
    colours = [OURS if "kvbus" in name else OTHERS for name in names]
    bars = axes.barh(range(len(names)), values, color=colours, height=0.7)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, color=text)
    axes.set_yticks(range(len(names)), names, color=text)
    title = textwrap.fill(f"{panel.title}, {panel.unit}", title_columns)
    axes.set_title(title, loc="left", fontsize=TITLE_POINTS, color=text)
    axes.margins(x=0.15)
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[:].set_visible(False)


def _undated(path: Path) -> dict[str, None]:
    return {"Date": None} if path.suffix == ".svg" else {}
