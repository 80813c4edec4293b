"""Cases, figures and targets of the benchmark; imports no case, which would take seconds."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from kvbus.histograms import p99, quantile

if TYPE_CHECKING:
    from kvbus.lab.process import TimedFetch


EVERY_TIME = (
    *("contiguous-64m", "scattered-256k", "scattered-16k", "fixed", "rate", "load", "idle"),
    *("tp-1-to-2", "hnd-to-nhd"),
)
CASES = (*EVERY_TIME, "large", "park")
"""In order of measurement. The last two run only on request; ``large`` needs 9 GiB."""
GPU_CASES = (
    "contiguous",
    "scattered-256k",
    "scattered-16k",
    "tp-1-to-2",
    "hnd-to-nhd",
    "one-block",
)
MAX_MIB = 1024


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 30
    factor: float = 1.0

    def count(self, full: int, *, at_least: int = 2) -> int:
        return max(at_least, round(full * self.factor))

    def seconds(self, full: float) -> float:
        return max(0.2, full * self.factor)


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None

    @property
    def target(self) -> str:
        if self.least is not None:
            return f">= {_short(self.least)}"
        return "" if self.most is None else f"<= {_short(self.most)}"

    @property
    def met(self) -> bool | None:
        if self.least is not None:
            return self.value >= self.least
        return None if self.most is None else self.value <= self.most

    def row(self, case: str) -> dict[str, Any]:
        return {
            "case": case,
            "name": self.name,
            "value": float(f"{self.value:.6g}"),
            "unit": self.unit,
            "target": self.target or None,
            "met": self.met,
        }


def _short(bound: float) -> str:
    return f"{bound:.0f}" if bound >= 1000 else f"{bound:.3g}"


def milliseconds(name: str, seconds: float, *, most: float | None = None) -> Figure:
    return Figure(name, seconds * 1e3, "ms", most)


def speed(name: str, num_bytes: int, seconds: float) -> Figure:
    return Figure(name, num_bytes / seconds / 1e9, "GB/s")


FETCH_STAGES = ("resolving", "queued", "acquiring", "waiting", "reading", "committing")
STAGES = (*FETCH_STAGES, "engine to agent")


def stages(fetches: "Sequence[TimedFetch]", prefix: str = "  ") -> list[Figure]:
    by_fetch = [[getattr(one.fetched.stages_s, stage) for stage in FETCH_STAGES] for one in fetches]
    outside = [one.seconds - sum(times) for one, times in zip(fetches, by_fetch, strict=True)]
    by_stage = [*zip(*by_fetch, strict=True), outside]
    return [
        milliseconds(f"{prefix}{name} p50", median(times))
        for name, times in zip(STAGES, by_stage, strict=True)
        if any(times)
    ]


def percentiles(
    name: str, seconds: Sequence[float], *, most_p50: float | None = None, most: float | None = None
) -> list[Figure]:
    tail_s = p99(seconds)
    found = [milliseconds(f"{name} p50", quantile(seconds, 0.5), most=most_p50)]
    return found if tail_s is None else [*found, milliseconds(f"{name} p99", tail_s, most=most)]


Ways = Mapping[str, Callable[[], Awaitable[float]]]


async def in_turn(rounds: Iterable[int], ways: Ways) -> dict[str, list[float]]:
    """Rounds interleave the ways, so a disturbance affects all."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in rounds:
        for name, way in ways.items():
            times[name].append(await way())
    return times
