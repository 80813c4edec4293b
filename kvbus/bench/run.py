"""One run of the benchmark: agents and engines up, the cases in turn, everything down.

A failed run shows the end of the agents' logs.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console

from kvbus.bench.case_names import CaseName
from kvbus.bench.cases import CASES
from kvbus.bench.engines import running_bench
from kvbus.bench.figures import Figure
from kvbus.bench.processes import agent
from kvbus.bench.scale import Scale
from kvbus.errors import KVBusError


def run_bench(names: Sequence[CaseName], scale: Scale) -> list[Figure]:
    """Measure the cases; raises `KVBusError`, alone or in groups, when a handoff fails."""
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
        return anyio.run(_run, names, scale, Path(folder), Console(stderr=True))


async def _run(
    names: Sequence[CaseName], scale: Scale, folder: Path, console: Console
) -> list[Figure]:
    figures: list[Figure] = []
    with agent("prefill", folder) as prefill, agent("decode", folder) as decode:
        try:
            with running_bench(prefill, decode, folder) as bench:
                for name in names:
                    with console.status(f"measuring {name}"):
                        figures += await CASES[name](bench, scale)
        except* KVBusError:
            for one in (prefill, decode):
                console.print(f"the end of the {one.role} agent's log:", one.log_tail())
            raise
    return figures
