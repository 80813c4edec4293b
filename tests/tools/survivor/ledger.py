"""Counts, failures and pauses of a survivor run."""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from tests.tools.survivor.draws import Event

MAX_KEPT = 3
MAX_GROUPS = 40
NUM_BEFORE = 4
NAMES_IN_TEXT = re.compile(r"kv-\w{8}|[0-9a-f]{8,}(-[0-9a-f]{4,})*|\d+(\.\d+)*")


@dataclass
class Happened:
    """One event, when it began and when the tool had undone it, by `time.monotonic`.

    The death of an agent is undone when the next one serves.
    """

    kind: str
    role: str
    began_s: float
    over_s: float = math.inf


class NothingHit(Exception):
    """An event found nothing to hit, such as a connection."""


@dataclass
class Pause:
    """The longest time without a completed request, and how much of it the event itself took."""

    pause_s: float = 0.0
    event_s: float = 0.0


@dataclass
class Group:
    """Failures that differ in numbers and ids only."""

    count: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Ledger:
    """Counts of one run, over all its clusters."""

    began_s: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    groups: dict[str, Group] = field(default_factory=dict)
    completed_s: dict[int, list[float]] = field(default_factory=dict)
    happened: dict[int, list[Happened]] = field(default_factory=dict)

    def begin(self, cluster: int) -> None:
        """Start to measure pauses of a cluster."""
        self.completed_s[cluster], self.happened[cluster] = [time.monotonic()], []

    def completed(self, cluster: int, path: str) -> None:
        """Count a request."""
        self.counts["completed"] += 1
        self.paths[path or "nothing"] += 1
        self.completed_s[cluster].append(time.monotonic())

    @contextmanager
    def causing(self, cluster: int, event: Event) -> Iterator[None]:
        """Note an event, which is over with the block; without it when that raises `NothingHit`."""
        one = Happened(event.kind, event.role, time.monotonic())
        self.happened[cluster].append(one)
        try:
            yield
        except NothingHit:
            self.happened[cluster].remove(one)
            self.skipped[event.kind] += 1
        one.over_s = time.monotonic()

    def fail(self, what: str, cluster: int, message: str, **more: Any) -> dict[str, Any] | None:
        """Count a failure. Return its entry in the report if it is one of the first of its kind."""
        self.counts[what] += 1
        name = f"{what}: {NAMES_IN_TEXT.sub('#', message)}"
        if name not in self.groups and len(self.groups) >= MAX_GROUPS:
            name = f"{what}: others"
        group = self.groups.setdefault(name, Group())
        group.count += 1
        if len(group.examples) >= MAX_KEPT:
            return None
        now = time.monotonic()
        before = [
            f"{one.kind} {one.role} {now - one.began_s:.2f} s before"
            for one in self.happened.get(cluster, [])[-NUM_BEFORE:]
        ]
        at_s = round(now - self.began_s, 2)
        kept = {"cluster": cluster, "at_s": at_s, "message": message, "events": before, **more}
        group.examples.append(kept)
        self.say(f"{what} in cluster {cluster}: {message}")
        return kept

    def say(self, what: str) -> None:
        """Report progress on stderr."""
        at_s, done, failed = (
            time.monotonic() - self.began_s,
            self.counts["completed"],
            self.counts["failed"],
        )
        begun = f"{at_s:.0f} s, {self.num_events} events, {done} completed, {failed} failed"
        print(f"survivor, {begun}: {what}", file=sys.stderr, flush=True)

    @property
    def num_events(self) -> int:
        """Number of events so far, in all clusters."""
        return sum(map(len, self.happened.values()))

    def report(self) -> dict[str, Any]:
        """All of it, for JSON."""
        pauses: dict[str, Pause] = {}
        for cluster, happened in self.happened.items():
            add_pauses(pauses, happened, self.completed_s[cluster])
        kinds = Counter(one.kind for some in self.happened.values() for one in some)
        groups = sorted(self.groups.items(), key=lambda item: -item[1].count)
        return {
            "seconds": round(time.monotonic() - self.began_s, 1),
            "events_by_kind": dict(sorted(kinds.items())),
            "skipped": dict(self.skipped),
            "counts": dict(sorted(self.counts.items())),
            "paths": dict(self.paths.most_common()),
            "longest_pauses": {
                kind: {name: round(value, 2) for name, value in asdict(pause).items()}
                for kind, pause in sorted(pauses.items())
            },
            "failures": {name: asdict(group) for name, group in groups},
        }


def add_pauses(
    pauses: dict[str, Pause], happened: Iterable[Happened], completed_s: Sequence[float]
) -> None:
    """Charge each time without a completed request to the first event in it.

    Without one in it, to the last event before it. A pause counts from the start of the event.
    """
    events = sorted(happened, key=lambda one: one.began_s)
    for before_s, after_s in pairwise(completed_s):
        inside = [one for one in events if before_s <= one.began_s < after_s]
        earlier = [one for one in events if one.began_s < before_s]
        if inside:
            cause, from_s = inside[0], inside[0].began_s
        elif earlier:
            cause, from_s = earlier[-1], before_s
        else:
            continue
        pause = pauses.setdefault(cause.kind, Pause())
        if after_s - from_s > pause.pause_s:
            pause.pause_s = after_s - from_s
            pause.event_s = max(0.0, min(cause.over_s, after_s) - from_s)
