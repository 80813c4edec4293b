"""By how much the agents of a chaos run have grown, calm by calm, for who wants to see.

Refuses to judge: an agent lives for one world at most, in which its caches still fill, and memory
grows in steps. `tests.soak` judges.
"""

from pathlib import Path
from typing import NamedTuple

PER = 1000


class Sample(NamedTuple):
    """Anonymous memory of a process in KiB, after so many handoffs of the whole run."""

    handoffs: int
    kib: int


class Growth:
    """What was seen of each process, from its first calm to its last."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[Sample]] = {}

    def look(self, name: str, pid: int, handoffs: int) -> None:
        """Note what it has now."""
        self._seen.setdefault((name, pid), []).append(Sample(handoffs, anonymous_kib(pid)))

    def by_agent(self) -> dict[str, dict[str, float]]:
        """Of each agent, the process that was there for the most handoffs, if for any."""
        found: dict[str, dict[str, float]] = {}
        for (name, _), samples in self._seen.items():
            first, last = samples[0], samples[-1]
            handoffs = last.handoffs - first.handoffs
            if handoffs > found.get(name, {}).get("handoffs", 0):
                per = round((last.kib - first.kib) * PER / handoffs, 1)
                found[name] = {"handoffs": handoffs, "kib_per_1000": per, "kib": last.kib}
        return found


def anonymous_kib(pid: int) -> int:
    """Memory of a process that is no file's."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    return 0
