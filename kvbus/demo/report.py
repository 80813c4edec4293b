"""Results of the demo. Equal outputs have equal tokens and logits."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

import typer

from kvbus.demo.options import DemoOptions, Step
from kvbus.histograms import p99, quantile
from kvbus.lab.process import TimedFetch
from kvbus.output import write_json, write_text
from kvbus.text import printable


@dataclass(slots=True)
class Served:
    request_id: str
    prompt: str
    first: Step | None = None
    timed: TimedFetch | None = None
    steps: list[Step] | None = None
    failed: str = ""


@dataclass(slots=True)
class DemoReport:
    """``alone`` has the reference steps by prompt. ``leaks`` is None until counted."""

    options: DemoOptions
    served: list[Served] = field(default_factory=list)
    alone: dict[str, list[Step]] = field(default_factory=dict)
    leaks: dict[str, int] | None = None
    trouble: list[str] = field(default_factory=list)
    ended_by: Signals | None = None

    @property
    def not_compared(self) -> set[str]:
        return {one.prompt for one in self.served if one.steps is not None} - self.alone.keys()

    @property
    def num_uncompared(self) -> int:
        return sum(one.steps is not None and one.prompt in self.not_compared for one in self.served)

    @property
    def num_unfinished(self) -> int:
        num_ended = sum(one.steps is not None or bool(one.failed) for one in self.served)
        return self.options.requests - num_ended

    def summary(self) -> dict[str, Any]:
        timed = [one.timed for one in self.served if one.timed is not None]
        times_s = [one.seconds for one in timed]
        failures = Counter(one.failed for one in self.served if one.failed)
        return {
            "requests": self.options.requests,
            "matched": sum(map(self._is_equal, self.served)),
            "failed": failures.total(),
            "failures": failures,
            "uncompared": self.num_uncompared,
            "unfinished": self.num_unfinished,
            "trouble": self.trouble,
            "bytes": sum(one.fetched.num_bytes for one in timed),
            "handoff_ms": {
                name: None if seconds is None else round(seconds * 1e3, 3)
                for name, seconds in (
                    ("p50", quantile(times_s, 0.5) if times_s else None),
                    ("p99", p99(times_s)),
                    ("max", max(times_s, default=None)),
                )
            },
            "paths": Counter(one.fetched.path for one in timed),
            "leaked_blocks": None if self.leaks is None else sum(self.leaks.values()),
        }

    @property
    def ok(self) -> bool:
        found = self.summary()
        is_whole = found["matched"] == self.options.requests and not self.trouble
        return is_whole and found["leaked_blocks"] == 0

    def print(self) -> None:
        write_text("".join(f"{printable(line)}\n" for line in self._lines()))

    def end(self) -> None:
        found = self.summary()
        failed = [f"{count} failed: {why}" for why, count in found["failures"].items()]
        sys.stderr.writelines(f"error: {printable(one)}\n" for one in (*failed, *self.trouble))
        if self.ended_by is not None:
            sys.stderr.write(f"ended by {self.ended_by.name}; all processes have ended, too\n")
        if self.options.as_one_json:
            write_json(found)
        if self.ended_by is not None:
            raise typer.Exit(128 + self.ended_by)
        if not self.ok:
            raise typer.Exit(1)

    def _is_equal(self, one: Served) -> bool:
        if one.first is None or one.steps is None:
            return False
        return [one.first, *one.steps] == self.alone.get(one.prompt)

    def _lines(self) -> Iterator[str]:
        found = self.summary()
        yield " -> ".join(f"{role} {fields}" for role, fields in self.options.sides.items())
        equal = f"{found['matched']} outputs equal to the model run alone, tokens and logits"
        is_compared = self.alone or not self.num_uncompared
        yield f"{found['requests']} requests" + (f", {equal}" if is_compared else "")
        for one in self.served:
            if one.prompt in self.alone and one.steps is not None and not self._is_equal(one):
                yield f"the output of request {one.request_id} differs"
        if found["paths"]:
            paths = ", ".join(f"{number} {path}" for path, number in found["paths"].items())
            took = ", ".join(
                f"{one_ms:.1f} ms ({name})"
                for name, one_ms in found["handoff_ms"].items()
                if one_ms is not None
            )
            yield f"moved {found['bytes'] / 1e6:.1f} MB ({paths}); a handoff took {took}"
        if self.num_uncompared:
            yield f"{self.num_uncompared} finished and were not compared"
        if self.num_unfinished:
            yield f"{self.num_unfinished} did not finish"
        if self.leaks is None:
            yield "what is still held was not counted"
        elif found["leaked_blocks"]:
            held = ", ".join(f"{number} of {role}" for role, number in self.leaks.items())
            yield f"blocks that are still held: {held}"
        else:
            yield "every block was released"
