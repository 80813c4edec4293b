"""What an agent has, seen from outside: the files of its process in /proc, and its metrics page.

It is looked at once nothing is on its way: what is held for a handoff is no leak.
"""

import asyncio
import re
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.agents import AgentProcess
from tests.soak.verdict import Sample

HELD = (
    "fetches", "draining_fetches", "offers", "leases", "packs", "slots", "copies",
    "quarantined_blocks", "outstanding_handles",
)  # fmt: skip
CALM_WITHIN_S = 60.0
LOOK_S = 0.1


async def look(agent: AgentProcess) -> Sample:
    """A sample once all has ended; raises `AssertionError` when it does not."""
    deadline = time.monotonic() + CALM_WITHIN_S
    while held := {name: number for name, number in metrics_of(agent).items() if name in HELD}:
        if not any(held.values()):
            break
        assert time.monotonic() < deadline, f"{agent.folder} holds {held} after all had ended"
        await asyncio.sleep(LOOK_S)
    metrics, process = metrics_of(agent), Path(f"/proc/{agent.pid}")
    return Sample(
        num_handoffs=round(metrics.get("handoffs_total", metrics.get("offers_total", 0))),
        anonymous_bytes=_anonymous_bytes(process),
        num_descriptors=len(list((process / "fd").iterdir())),
        num_threads=len(list((process / "task").iterdir())),
        num_mappings=len((process / "maps").read_text(errors="replace").splitlines()),
        outstanding_handles=round(metrics.get("outstanding_handles", 0)),
        unreleased_handles=round(metrics.get("unreleased_handles", 0)),
        ended_bytes=round(metrics["ended_bytes"]),
        reply_bytes=round(metrics["reply_bytes"]),
    )


def metrics_of(agent: AgentProcess) -> dict[str, float]:
    """Each metric of kvbus by its name, summed over its labels."""
    metrics: dict[str, float] = {}
    for family in text_string_to_metric_families(agent.page("/metrics")[1]):
        for sample in family.samples:
            name = sample.name.removeprefix("kvbus_")
            metrics[name] = metrics.get(name, 0.0) + sample.value
    return metrics


def _anonymous_bytes(process: Path) -> int:
    """Memory that is neither a file's nor shared with another process."""
    rollup = (process / "smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Anonymous:\s+(\d+) kB$", rollup, re.MULTILINE)
    assert found is not None, rollup
    return int(found[1]) * 1024
