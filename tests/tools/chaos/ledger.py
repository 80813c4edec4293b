"""Counts and violations of a chaos run; a violation has its seed, time and history."""

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_KEPT = 3
MAX_TEXT = 1500


@dataclass
class Ledger:
    """Counts by name; ``violations`` with what is known of each."""

    seed: int
    stops_at_first: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[dict[str, Any]] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def violate(self, what: str, of: str, **more: Any) -> None:
        self.counts[f"violation_{what}"] += 1
        of = of[-MAX_TEXT:]
        at_s = round(time.monotonic() - self.started_at, 2)
        one = {"what": what, "of": of, "at_s": at_s, **more}
        if self.counts[f"violation_{what}"] <= MAX_KEPT:
            self.violations.append(one)
            self.say(f"{what}: {of}")

    def say(self, what: str) -> None:
        at_s = time.monotonic() - self.started_at
        handoffs = self.counts["handoffs"]
        line = f"chaos, seed {self.seed}, {at_s:.0f} s, {handoffs} handoffs: {what}"
        print(line, file=sys.stderr, flush=True)

    @property
    def is_over(self) -> bool:
        return self.stops_at_first and bool(self.violations)

    def line(self, **more: Any) -> str:
        fields = {
            "seed": self.seed,
            **more,
            "seconds": round(time.monotonic() - self.started_at, 1),
            **dict(sorted(self.counts.items())),
            "codes": dict(self.codes.most_common()),
            "paths": dict(self.paths.most_common()),
            "faults": dict(sorted(self.faults.items())),
            "violations": self.violations,
        }
        return json.dumps(fields)


class Stops:
    """Times in which a process was stopped; they do not count as delays."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._since: float | None = None

    @property
    def is_stopped(self) -> bool:
        return self._since is not None

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        if self._since is not None:
            self._spans.append((self._since, time.monotonic()))
            self._since = None

    def add(self, start: float, stop: float) -> None:
        self._spans.append((start, stop))

    def lost_s(self, since: float) -> float:
        now = time.monotonic()
        spans = [*self._spans, (self._since, now)] if self._since is not None else self._spans
        return sum(max(0.0, stop - max(start, since)) for start, stop in spans)
