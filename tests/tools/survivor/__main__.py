"""Runs ``make survivor``: kill, stop, cut and move agents under load; no request may fail.

Prints a report in JSON. The exit status is 1 after a failed request, a wrong byte or a lost block.
It is also 1 if an agent ended by itself, or if the events did not fit into the time.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.agents import Agents, agents_ended
from tests.support.namespaces import HAVE_NAMESPACES, Host, bridged
from tests.tools.survivor.cluster import CHECK_S, Cluster
from tests.tools.survivor.draws import BOTH, KINDS, Event, draw_events
from tests.tools.survivor.ledger import Ledger
from tests.tools.survivor.load import Load

MINUTES = 10.0
SETTLES_S = 60.0
"""Time that is reserved for the requests after the last event."""
RECOVERS_WITHIN_S, EVENT_WITHIN_S = 60.0, 120.0
SAY_EVERY_S = 15.0
FAILURES = (
    "failed", "wrong_bytes", "late_write", "ended_twice", "closed_early", "engine_failed",
    "blocks_lost", "agents_died", "not_recovered", "events_missing",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the longest that it runs")
    parser.add_argument("--clusters", type=int, default=6, help="pairs of agents side by side")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--timeout-s", type=float, default=60.0, help="deadline of a fetch")
    parser.add_argument("--ttl-s", type=float, default=90.0, help="time to live of an offer")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of all agents")
    wanted = parser.parse_args()
    if not HAVE_NAMESPACES:
        sys.exit("make survivor needs root and iproute2, for network namespaces")
    ledger = Ledger()
    names = [f"{role[0]}{number}" for number in range(wanted.clusters) for role in BOTH]
    with bridged(*names) as hosts, agents_ended(Agents) as agents:
        by_cluster = [
            {role: hosts[f"{role[0]}{number}"] for role in BOTH}
            for number in range(wanted.clusters)
        ]
        try:
            asyncio.run(run(wanted, by_cluster, agents, ledger))
        finally:
            agents.end()
            if wanted.logs:
                keep_logs(agents, wanted.logs)
    settings = {name: value for name, value in vars(wanted).items() if name != "logs"}
    is_good = ledger.counts["completed"] > 0 and not any(ledger.counts[one] for one in FAILURES)
    print(json.dumps({"passed": is_good, **settings, **ledger.report()}, indent=1), flush=True)
    sys.exit(not is_good)


async def run(
    wanted: argparse.Namespace, hosts: Sequence[dict[str, Host]], agents: Agents, ledger: Ledger
) -> None:
    """Load all clusters, cause the events, and wait for what is left."""
    deadline = time.monotonic() + 60 * wanted.minutes - SETTLES_S
    clusters = [Cluster(number, some, agents, ledger) for number, some in enumerate(hosts)]
    try:
        await asyncio.gather(*(one.open() for one in clusters))
        ledger.say("all engines are up")
        runs = [Run(one, wanted, deadline) for one in clusters]
        saying = asyncio.create_task(say_progress(ledger))
        await asyncio.gather(*(one.run(wanted.kinds) for one in runs))
        saying.cancel()
        if missing := wanted.events - ledger.num_events:
            ledger.fail("events_missing", -1, f"{missing} events did not fit into the time")
    finally:
        for one in clusters:
            await one.close()


class Run:
    def __init__(self, cluster: Cluster, wanted: argparse.Namespace, deadline: float) -> None:
        self._cluster, self._deadline, self._num_events = cluster, deadline, wanted.events
        self._ledger = cluster.ledger
        self._seed = f"{wanted.seed}/{cluster.number}"
        deadlines = {"timeout_s": wanted.timeout_s, "ttl_s": wanted.ttl_s}
        self._load = Load(cluster, f"{self._seed}/load", **deadlines)

    async def run(self, kinds: Sequence[str]) -> None:
        """Cause events until all clusters together had as many as wanted, or the time is over."""
        self._ledger.begin(self._cluster.number)
        load = asyncio.create_task(self._load.run())
        await self._recovered()
        for event in draw_events(f"{self._seed}/events", kinds):
            if self._ledger.num_events >= self._num_events or time.monotonic() > self._deadline:
                break
            await self._cause(event)
            if not event.overlaps:
                await self._recovered()
            await asyncio.sleep(event.gap_s)
        await self._recovered()
        self._load.stop()
        await load
        await self._load.settle()

    async def _cause(self, event: Event) -> None:
        try:
            async with asyncio.timeout(event.for_s + EVENT_WITHIN_S):
                await self._cluster.cause(event)
        except TimeoutError:
            self._cluster.fail("not_recovered", f"{event.kind} of the {event.role} agent hangs")

    async def _recovered(self) -> None:
        """Return when a request has completed that began after this call."""
        from_s = time.monotonic()
        while self._load.newest_completed_s <= from_s:
            if time.monotonic() > from_s + RECOVERS_WITHIN_S:
                self._cluster.fail("not_recovered", f"no request in {RECOVERS_WITHIN_S:.0f} s")
                return
            await asyncio.sleep(CHECK_S)


async def say_progress(ledger: Ledger) -> None:
    while True:
        await asyncio.sleep(SAY_EVERY_S)
        ledger.say("under way")


def keep_logs(agents: Agents, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, agent in enumerate(agents.all):
        cluster = number // len(BOTH)
        shutil.copy(agent.log_path, folder / f"agent-{agent.role}-{cluster}.log")
    for log in agents.folder.glob("*.log"):
        shutil.copy(log, folder)


if __name__ == "__main__":
    main()
