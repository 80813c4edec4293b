"""One run of the benchmark: agents and engines up, the cases in turn, everything down.

Refuses to print figures; a failed run shows what the agents said last.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console

from kvbus.bench.agents import BenchAgent, agent
from kvbus.bench.case_names import CaseName
from kvbus.bench.cases import CASES
from kvbus.bench.effort import Effort
from kvbus.bench.engines import prefill_engine
from kvbus.bench.figures import Figure
from kvbus.errors import KVBusError


def run_bench(names: Sequence[CaseName], effort: Effort) -> list[Figure]:
    """Measure the cases; raises `KVBusError`, alone or in groups, when a handoff fails."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
        return anyio.run(_run, names, effort, Path(folder), console)


async def _run(
    names: Sequence[CaseName], effort: Effort, folder: Path, console: Console
) -> list[Figure]:
    with agent("prefill", folder) as prefill, agent("decode", folder) as decode:
        try:
            return await _measure(names, effort, (prefill, decode), console)
        except* KVBusError:
            for one in (prefill, decode):
                console.print(f"the {one.role} agent's last words:", one.last_words(), style="dim")
            raise


async def _measure(
    names: Sequence[CaseName],
    effort: Effort,
    agents: tuple[BenchAgent, BenchAgent],
    console: Console,
) -> list[Figure]:
    figures: list[Figure] = []
    async with prefill_engine(*agents, agents[0].log.parent) as bench:
        for name in names:
            with console.status(f"measuring {name}"):
                figures += await CASES[name](bench, effort)
    return figures
