"""The cases of the benchmark: agents and engines up, the cases in turn, everything down."""

import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console

from kvbus.bench.cases.idle import measure_idle, measure_memory
from kvbus.bench.cases.load import measure_load
from kvbus.bench.cases.publishing import measure_chunked, measure_host
from kvbus.bench.cases.rate import measure_rate
from kvbus.bench.cases.reshapes import RESHAPES, measure_reshape
from kvbus.bench.cases.transfers import TRANSFERS, measure_fixed, measure_transfer
from kvbus.bench.engines import Bench, running_bench
from kvbus.bench.figures import CaseName, Figure, Figures, Scale
from kvbus.bench.processes import agent
from kvbus.errors import KVBusError

Case = Callable[[Bench, Scale], Awaitable[list[Figure]]]

CASES: Mapping[CaseName, Case] = {
    **{name: partial(measure_transfer, one) for name, one in TRANSFERS.items()},
    CaseName.FIXED: measure_fixed,
    CaseName.LOAD: measure_load,
    CaseName.IDLE: measure_idle,
    CaseName.RATE: measure_rate,
    **{name: partial(measure_reshape, one) for name, one in RESHAPES.items()},
    CaseName.CHUNKED: measure_chunked,
    CaseName.HOST: measure_host,
    CaseName.MEMORY: measure_memory,
}


def run_cases(names: Sequence[CaseName], scale: Scale) -> Figures:
    """Measure the cases; raises `KVBusError`, alone or in groups, when a handoff fails."""
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
        return anyio.run(_run, names, scale, Path(folder), Console(stderr=True))


async def _run(names: Sequence[CaseName], scale: Scale, folder: Path, console: Console) -> Figures:
    """A failed run shows the end of the agents' logs."""
    measured: dict[CaseName, list[Figure]] = {}
    with agent("prefill", folder) as prefill, agent("decode", folder) as decode:
        try:
            with running_bench(prefill, decode, folder) as bench:
                for name in names:
                    with console.status(f"measuring {name}"):
                        measured[name] = await CASES[name](bench, scale)
        except* KVBusError:
            for one in (prefill, decode):
                console.print(one.child.lost("runs"), markup=False)
            raise
    return measured
