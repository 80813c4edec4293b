"""What an agent has, seen from outside: the files of its process in /proc, and its metrics page.

Refuses to look while anything is on its way: what is held for a handoff is no leak.
"""

import http.client
import re
import time
from contextlib import closing
from pathlib import Path

import anyio
from prometheus_client.parser import text_string_to_metric_families

from kvbus.bench.processes import BenchAgent
from kvbus.errors import RequestTimeout
from tests.soak.verdict import Sample

HELD = (
    "fetches", "draining_fetches", "offers", "leases", "packs", "slots", "copies",
    "quarantined_blocks", "outstanding_handles",
)  # fmt: skip
CALM_WITHIN_S = 60.0
LOOK_S = 0.1
Metrics = dict[str, float]


async def look(agent: BenchAgent) -> Sample:
    """A sample once all has ended; raises `RequestTimeout` when it does not."""
    deadline = time.monotonic() + CALM_WITHIN_S
    while held := _held(metrics := _metrics(agent)):
        if time.monotonic() > deadline:
            raise RequestTimeout(
                f"the {agent.child.name} holds {held} yet, {CALM_WITHIN_S:g} s after all had ended"
            )
        await anyio.sleep(LOOK_S)
    process = Path(f"/proc/{agent.child.pid}")
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


def _held(metrics: Metrics) -> Metrics:
    return {name: metrics[name] for name in HELD if metrics.get(name)}


def _metrics(agent: BenchAgent) -> Metrics:
    """Each metric of kvbus by its name, summed over its labels."""
    connection = http.client.HTTPConnection("127.0.0.1", agent.metrics_port, timeout=CALM_WITHIN_S)
    with closing(connection):
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    metrics: Metrics = {}
    for family in text_string_to_metric_families(page):
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
