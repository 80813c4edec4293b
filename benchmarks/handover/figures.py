"""Tables and JSON of the series that the blocks gave, and the targets that they are held against.

Refuses to measure.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbus.histograms import quantile

Rounds = Mapping[str, Sequence[Mapping[str, list[float]]]]
"""By connector, the series of each round."""

IDLE, LOAD = "idle handover ms", "load handover ms"
FEW = 3  # samples that have no percentiles
STEP, PREFILL = "step beside handovers ms", "prefill beside handovers ms"
IN_TURNS = (
    "step in turns, KV {}, ms",
    "step during a load in turns, KV {}, ms",
    "prefill in turns, KV {}, ms",
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One series of ``connector`` beside that of ``baseline``, and the most that it should be."""

    name: str
    connector: str
    baseline: str
    baseline_name: str
    target: float | None


RATIOS = (
    Ratio(IDLE, "kvbus", "nixl", IDLE, 0.7),
    Ratio(LOAD, "kvbus", "nixl", LOAD, 0.5),
    Ratio(IDLE, "kvbus", "nixl-tuned", IDLE, 0.7),
    Ratio(LOAD, "kvbus", "nixl-tuned", LOAD, 0.5),
    *(
        Ratio(name.format("moved"), connector, connector, name.format("cached"), 1.05)
        for connector in ("kvbus", "kvbus-equal")
        for name in IN_TURNS
    ),
    *(
        Ratio(name, connector, "none", baseline_name, 1.05 if connector == "kvbus" else None)
        for connector in ("kvbus", "nixl", "nixl-tuned")
        for name, baseline_name in ((STEP, STEP), (STEP, "step alone ms"), (PREFILL, PREFILL))
    ),
)


def pooled(rounds: Rounds, connector: str, name: str) -> list[float]:
    """The samples of all rounds."""
    return [sample for series in rounds.get(connector, ()) for sample in series.get(name, [])]


def ratio(rounds: Rounds, wanted: Ratio) -> tuple[float, float]:
    """Of the pooled medians, and the median of the ratios of each round's medians."""
    ours = pooled(rounds, wanted.connector, wanted.name)
    theirs = pooled(rounds, wanted.baseline, wanted.baseline_name)
    by_round = [
        statistics.median(our[wanted.name]) / statistics.median(their[wanted.baseline_name])
        for our, their in zip(rounds[wanted.connector], rounds[wanted.baseline], strict=False)
    ]
    return statistics.median(ours) / statistics.median(theirs), statistics.median(by_round)


def table(rounds: Rounds) -> str:
    """A Markdown table: p50, p99 and mean of each series, one column a connector."""
    names = list(
        dict.fromkeys(name for all_of in rounds.values() for one in all_of for name in one)
    )
    lines = ["| p50 / p99 / mean | " + " | ".join(rounds) + " |"]
    lines += ["| --- |" + " --- |" * len(rounds)]
    for name in names:
        cells = [_cell(pooled(rounds, connector, name)) for connector in rounds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(rounds: Rounds, all_wanted: Sequence[Ratio] = RATIOS) -> list[str]:
    """One line for each ratio whose two sides were measured."""
    lines = []
    for wanted in all_wanted:
        if not (
            pooled(rounds, wanted.connector, wanted.name)
            and pooled(rounds, wanted.baseline, wanted.baseline_name)
        ):
            continue
        of_pooled, by_round = ratio(rounds, wanted)
        target = ""
        if wanted.target is not None:
            said = "met" if of_pooled <= wanted.target else "MISSED"
            target = f", target {wanted.target:g}: {said}"
        lines.append(
            f"{wanted.connector} {wanted.name} / {wanted.baseline} {wanted.baseline_name}: "
            f"{of_pooled:.3f} (by round {by_round:.3f}){target}"
        )
    return lines


def over_local_hits(rounds: Rounds) -> list[str]:
    """What a handover takes beyond the same decode request when nothing has to be moved."""
    lines = []
    for connector in rounds:
        if not pooled(rounds, connector, IDLE):
            continue
        floor = statistics.median(pooled(rounds, connector, "idle local hit ms"))
        p50 = statistics.median(pooled(rounds, connector, IDLE))
        lines.append(f"{connector}: idle handover p50 over a local hit {p50 - floor:.1f} ms")
        if connector != "none" and "none" in rounds:
            loaded, same = (statistics.median(pooled(rounds, c, LOAD)) for c in (connector, "none"))
            lines.append(f"{connector}: load handover p50 over none's {loaded - same:.1f} ms")
    return lines


def as_json(rounds: Rounds, machine: Mapping[str, Any]) -> str:
    """Return everything, every sample included, as one line."""
    rounded = {
        connector: [{name: [round(s, 4) for s in one[name]] for name in one} for one in all_of]
        for connector, all_of in rounds.items()
    }
    return json.dumps({"machine": dict(machine), "rounds": rounded})


def _cell(samples: Sequence[float]) -> str:
    if not samples:
        return ""
    if len(samples) <= FEW:
        return f"{statistics.median(samples):.1f}"
    p50, p99 = quantile(samples, 0.5), quantile(samples, 0.99)
    return f"{p50:.1f} / {p99:.1f} / {statistics.fmean(samples):.1f}"
