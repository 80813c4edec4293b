"""Counts, failures and pauses of a survivor run."""

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from tests.tools.survivor.draws import Event

MAX_KEPT, MAX_GROUPS, NUM_BEFORE = 3, 40, 4
NAMES_IN_TEXT = re.compile(r"kv-\w{8}|[0-9a-f]{8,}(-[0-9a-f]{4,})*|\d+(\.\d+)*")


class Happened(NamedTuple):
    """One event, and when it began, by `time.monotonic`."""

    kind: str
    role: str
    began_s: float


class NothingHit(Exception):
    """An event found nothing to hit, such as a connection."""


@dataclass
class Ledger:
    """Counts of one run, over all its clusters; ``groups`` differ in more than numbers and ids."""

    began_s: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    completed_s: dict[int, list[float]] = field(default_factory=dict)
    happened: dict[int, list[Happened]] = field(default_factory=dict)

    def begin(self, cluster: int) -> None:
        self.completed_s[cluster], self.happened[cluster] = [time.monotonic()], []

    def completed(self, cluster: int, path: str) -> None:
        self.counts["completed"] += 1
        self.paths[path or "nothing"] += 1
        self.completed_s[cluster].append(time.monotonic())

    @contextmanager
    def causing(self, cluster: int, event: Event) -> Iterator[None]:
        """Note the event that the block causes, unless that raises `NothingHit`."""
        one = Happened(event.kind, event.role, time.monotonic())
        self.happened[cluster].append(one)
        try:
            yield
        except NothingHit:
            self.happened[cluster].remove(one)
            self.skipped[event.kind] += 1

    def fail(self, what: str, cluster: int, message: str, **more: Any) -> dict[str, Any] | None:
        """Count a failure. Return its entry in the report if it is one of the first of its kind."""
        self.counts[what] += 1
        name = f"{what}: {NAMES_IN_TEXT.sub('#', message)}"
        if name not in self.groups and len(self.groups) >= MAX_GROUPS:
            name = f"{what}: others"
        self.groups[name] += 1
        if self.groups[name] > MAX_KEPT:
            return None
        now = time.monotonic()
        before = [
            f"{one.kind} {one.role} {now - one.began_s:.2f} s before"
            for one in self.happened.get(cluster, [])[-NUM_BEFORE:]
        ]
        at_s = round(now - self.began_s, 2)
        kept = {"cluster": cluster, "at_s": at_s, "message": message, "events": before, **more}
        self.examples.setdefault(name, []).append(kept)
        self.say(f"{what} in cluster {cluster}: {message}")
        return kept

    def say(self, what: str) -> None:
        at_s = time.monotonic() - self.began_s
        done, failed = self.counts["completed"], self.counts["failed"]
        begun = f"{at_s:.0f} s, {self.num_events} events, {done} completed, {failed} failed"
        print(f"survivor, {begun}: {what}", file=sys.stderr, flush=True)

    @property
    def num_events(self) -> int:
        return sum(map(len, self.happened.values()))

    def report(self) -> dict[str, Any]:
        kinds = Counter(one.kind for some in self.happened.values() for one in some)
        return {
            "seconds": round(time.monotonic() - self.began_s, 1),
            "events_by_kind": dict(sorted(kinds.items())),
            "skipped": self.skipped,
            "counts": dict(sorted(self.counts.items())),
            "paths": dict(self.paths.most_common()),
            "longest_pauses": self._longest_pauses(),
            "failures": {
                name: {"count": count, "examples": self.examples[name]}
                for name, count in self.groups.most_common()
            },
        }

    def _longest_pauses(self) -> dict[str, float]:
        """Charge each time without a completed request to the first event in it.

        Without one in it, to the last event before it. A pause counts from the start of the event.
        """
        pauses = dict[str, float]()
        for cluster, happened in self.happened.items():
            events = sorted(happened, key=lambda one: one.began_s)
            for before_s, after_s in pairwise(self.completed_s[cluster]):
                inside = [one for one in events if before_s <= one.began_s < after_s]
                earlier = [one for one in events if one.began_s < before_s]
                if cause := next(iter([*inside, *earlier[-1:]]), None):
                    pause_s = after_s - max(before_s, cause.began_s)
                    pauses[cause.kind] = max(pauses.get(cause.kind, 0.0), round(pause_s, 2))
        return pauses
