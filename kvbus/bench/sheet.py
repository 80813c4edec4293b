"""Figures for people: a table of at most 80 columns for each case.

`Figure.name` is for programs, and stable; `label` is what people read.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from kvbus.bench.figures import STAGES, Figure
from kvbus.output import write_text
from kvbus.progress import Progress

WIDTH, NO_BREAK = 79, "\N{NO-BREAK SPACE}"
ROW = "  {:51} {:>9} {:8} {}"
VERDICTS = {True: "ok", False: "missed", None: ""}
P50 = " p50"
ZERO_MS = 0.005
"""Shown as 0.00."""

TITLES = {
    "contiguous-64m": "64 MiB in one run of bytes",
    "scattered-256k": "runs of 256 KiB",
    "scattered-16k": "runs of 16 KiB",
    "fixed": "one block of 64 KiB, one handoff at a time",
    "rate": "one block of 64 KiB, 64 handoffs at a time",
    "load": "one block of 64 KiB, beside 1 GiB in flight",
    "idle": "agents without requests",
    "tp-1-to-2": "from an engine of one rank to one of two",
    "hnd-to-nhd": "from an engine with layout HND to one with NHD",
    "large": "one block of 64 KiB, beside a fetch of 4 GiB",
    "park": "64 MiB that the prefill agent copies to its pool",
    "contiguous": "one run of bytes",
    "one-block": "one block of 64 KiB, one handoff at a time",
    "runs-16k": "runs of 16 KiB",
    "runs-256k": "runs of 256 KiB",
    "in-order": "one run of bytes",
}
TWO_HOSTS = "kvbus as two hosts"
"""It reads as from another host, but over shared memory."""
TERMS = {
    "raw READ": "bare NIXL",
    "naive READ": "bare NIXL, run by run",
    "descriptors": "runs of bytes",
    "descriptors of naive READ": "runs of bytes",
    "auto": "kvbus",
    "unmapped": TWO_HOSTS,
    "equal": "kvbus, engines of equal shape",
    "equal shapes": "engines of equal shape",
    **{path: f"kvbus, path {path}" for path in ("mapped", "direct", "staged", "packed")},
    "the best path": "its best path",
    "offer to released": "from an offer to the release of its blocks",
    "handoff": "kvbus handoff",
    "floor": "bare messages",
    "floor handoffs": "bare messages, handoffs",
    "floor agents CPU": "bare messages, CPU of their agents",
    "both agents CPU": "CPU of both agents",
    "both agents CPU vs floor": "CPU of both agents : bare messages",
    "the slower pinned copy": "slower pinned copy",
    "mapped: pool vs engine": "time of kvbus, from the pool : from the engine",
    "unmapped: pool vs engine": f"time of {TWO_HOSTS}, from the pool : engine",
    "loop lags": "samples of the loop lag",
    "large fetches": "all large fetches",
    "parking": "copy to the pool",
    **{
        f"{way}, from the {place}": f"{said}, from the {place}"
        for way, said in (("mapped", "kvbus"), ("unmapped", TWO_HOSTS))
        for place in ("engine", "pool")
    },
    **{
        f"{way}, in huge pages": f"memory of {said} in huge pages"
        for way, said in (("raw READ", "bare NIXL"), ("kvbus", "kvbus"))
    },
}
PERCENTILES = {P50: "median", " p99": "p99", " max": "longest"}
GROUPS = {"mapped": "one host", "unmapped": "as two hosts"}
OF_UNIT = {"us each": " for each handoff", "% of core": ", of one core", "1/s": " a second"}
UNITS = {"us each": "us", "% of core": "%", "1/s": "/s"}


def label(name: str) -> str:
    name = name.strip()
    if name in TERMS:
        return TERMS[name]
    group, colon, rest = name.partition(": ")
    if colon:
        return f"{GROUPS.get(group, group)}: {label(rest)}"
    one, vs, other = name.partition(" vs ")
    if vs:
        kind = "time" if other == "floor" else "speed"
        return f"{kind} of {label(one)} : {label(other)}"
    for suffix, said in PERCENTILES.items():
        if name.endswith(suffix):
            return f"{label(name.removesuffix(suffix))}, {said}"
    process = name.removesuffix(" CPU")
    return name if process == name else f"CPU of the {process}"


def lines(case: str, figures: Sequence[Figure]) -> str:
    shown = [f"{case}: {TITLES[case]}", *_speeds(figures), *_rows(figures), *_stages(figures)]
    return "".join(f"{line.rstrip()}\n" for line in (*shown, ""))


class Sheet:
    """``head`` describes the machine."""

    def __init__(self, progress: Progress, head: str) -> None:
        self.progress, self.head = progress, head
        self.rows: list[dict[str, Any]] = []
        self.case: str | None = None

    def begin(self, case: str) -> None:
        self.case = case

    def show(self, figures: Sequence[Figure]) -> None:
        case = str(self.case)
        with self.progress.hidden():
            write_text(lines(case, figures))
        self.rows.extend(figure.row(case) for figure in figures)


def timed(figures: Sequence[Figure]) -> list[tuple[Figure, Figure]]:
    """Return speed and median time of each way to move the bytes, the fastest first."""
    times = {one.name: one for one in figures if one.name.endswith(P50)}
    speeds = [one for one in figures if one.unit == "GB/s" and one.name + P50 in times]
    return [(one, times[one.name + P50]) for one in sorted(speeds, key=lambda one: -one.value)]


def stage_of(name: str) -> str:
    """Return the stage of which this is the time, or nothing."""
    return next((stage for stage in STAGES if name.endswith(f" {stage}{P50}")), "")


def _speeds(figures: Sequence[Figure]) -> Iterator[str]:
    for speed, time in timed(figures):
        yield ROW.format(label(speed.name), _value(time), _value(speed), "")


def _rows(figures: Sequence[Figure]) -> Iterator[str]:
    shown = {one.name for pair in timed(figures) for one in pair}
    for one in figures:
        if one.name not in shown and not stage_of(one.name):
            said = label(one.name) + OF_UNIT.get(one.unit, "")
            yield ROW.format(said, _value(one), one.target, VERDICTS[one.met])


def _stages(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the medians of a fetch's stages that took any time, of one way after another."""
    by_way = dict[str, list[str]]()
    for one in figures:
        if (stage := stage_of(one.name)) and one.value >= ZERO_MS:
            way = one.name.strip().removesuffix(f"{stage}{P50}")
            text = f"{stage} {one.value:.2f}".replace(" ", NO_BREAK)
            by_way.setdefault(way, []).append(text)
    for way, texts in by_way.items():
        said = f"stages of a fetch, ms: {way}{', '.join(texts)}"
        filled = textwrap.fill(said, WIDTH, initial_indent="  ", subsequent_indent="    ")
        yield filled.replace(NO_BREAK, " ")


def _value(one: Figure) -> str:
    digits = 0 if isinstance(one.value, int) or one.value >= 100 else 2
    return f"{one.value:,.{digits}f} {UNITS.get(one.unit, one.unit)}".rstrip()
