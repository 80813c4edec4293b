"""Hands off at full rate for long, and says whether the agents grow: ``make soak MINUTES=60``.

A line of JSON each minute, or ten of a shorter run, with what each agent has while nothing is on
its way. The last line is the verdict; the exit status is 1 when an agent grows.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.tools.soak.load import READERS, load
from tests.tools.soak.verdict import Sample, judge

CAPS: Mapping[str, dict[str, int]] = {
    "small": {"max_ended_bytes": 1 << 20},
    "default": {},
}
"""How much the agents keep of what has ended: the least that they take, or what they do."""
PATIENT = {
    "prefill": {"max_lease_s": 300.0},
    "decode": {"request_timeout_s": 60.0, "fetch_timeout_s": 300.0, "lease_s": 300.0},
}
"""A machine that is busy with other things is no leak."""
LONGEST_PERIOD_S = 60.0
NUM_PERIODS = 10
STARTS_WITHIN_S, CALM_WITHIN_S, LOOK_S = 90.0, 60.0, 0.1
HELD = (
    "fetches", "draining_fetches", "offers", "leases", "packs", "slots", "copies",
    "quarantined_blocks", "data_jobs",
)  # fmt: skip
History = dict[str, list[Sample]]


def main() -> None:
    """Soak, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long the load lasts")
    parser.add_argument("--caps", choices=CAPS, default="small", help="what is kept of the ended")
    parser.add_argument("--seed", type=int, default=1, help="sizes and cancels are drawn from it")
    asked = parser.parse_args()
    with agents_ended(Agents) as made:
        history = asyncio.run(soak(made, 60 * asked.minutes, CAPS[asked.caps], asked.seed))
    verdicts = {name: judge(samples) for name, samples in history.items()}
    is_flat = not any(one.grows for one in verdicts.values())
    agents = {name: asdict(one) for name, one in verdicts.items()}
    print(json.dumps({"flat": is_flat, **vars(asked), "agents": agents}), flush=True)
    sys.exit(not is_flat)


async def soak(made: Agents, seconds: float, caps: dict[str, Any], seed: int) -> History:
    """The samples of each agent; fails if a handoff does, or an error is logged."""
    agents = {"prefill": start(made, "prefill", caps)}
    agents |= {name: start(made, "decode", caps | READERS[name]) for name in READERS}
    history: History = {name: [] for name in agents}
    num_periods = max(NUM_PERIODS, round(seconds / LONGEST_PERIOD_S))
    async with load(agents, seed) as handoffs:
        began = time.monotonic()
        for _ in range(num_periods):
            await handoffs.run_for(seconds / num_periods)
            for name, one in agents.items():
                history[name].append(await look(one))
            now = {name: asdict(samples[-1]) for name, samples in history.items()}
            lasted_s = round(time.monotonic() - began, 1)
            seen = {"seconds": lasted_s, "ended": handoffs.counts, "agents": now}
            print(json.dumps(seen), flush=True)
    for one in agents.values():
        assert not one.lines(), one.lines()
    return history


def start(made: Agents, role: str, settings: dict[str, Any]) -> AgentProcess:
    """An agent that logs errors only: a line for each handoff would fill a disk."""
    quiet = {**PATIENT[role], **settings, "log_level": "error"}
    agent: AgentProcess = made.prepare(role, **quiet)
    agent.launch()
    wait_until(lambda: _answers(agent), "it answers", STARTS_WITHIN_S)
    attach = f"{agent.settings['runtime_dir']}/attach.sock"
    agent.started = {"attach": attach, "peer": agent.settings["peer_bind"]}
    return agent


async def look(agent: AgentProcess) -> Sample:
    """A sample once all has ended; raises `AssertionError` when it does not."""
    deadline = time.monotonic() + CALM_WITHIN_S
    while any((metrics := metrics_of(agent))[name] for name in HELD):
        held = {name: metrics[name] for name in HELD}
        assert time.monotonic() < deadline, f"{agent.folder} holds {held} after all had ended"
        await asyncio.sleep(LOOK_S)
    processes = [Path(f"/proc/{pid}") for pid in (agent.pid, agent.data_pid)]
    return Sample(
        num_handoffs=metrics["handoffs_total"] or metrics["offers_total"],
        anonymous_bytes=sum(map(_anonymous_bytes, processes)),
        num_descriptors=sum(len(list((one / "fd").iterdir())) for one in processes),
        num_threads=sum(len(list((one / "task").iterdir())) for one in processes),
        num_mappings=sum(
            len((one / "maps").read_text(errors="replace").splitlines()) for one in processes
        ),
        num_restarts=metrics["data_restarts"],
        ended_bytes=metrics["ended_bytes"],
    )


def _anonymous_bytes(process: Path) -> int:
    """Memory that is neither a file's nor another process's as well."""
    found = re.search(r"(?m)^Anonymous:\s+(\d+) kB$", (process / "smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) * 1024


def metrics_of(agent: AgentProcess) -> Counter[str]:
    """Each metric of kvbus by its name, summed over its labels."""
    metrics = Counter[str]()
    for family in text_string_to_metric_families(agent.page("/metrics")[1]):
        for sample in family.samples:
            metrics[sample.name.removeprefix("kvbus_")] += round(sample.value)
    return metrics


def _answers(agent: AgentProcess) -> bool:
    with suppress(OSError):
        return agent.page("/metrics")[0] == 200
    return False


if __name__ == "__main__":
    main()
