"""The cases of the benchmark: agents and engines up, the cases in turn, everything down."""

import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import anyio

from kvbus.bench.cases.idle import measure_idle, measure_memory
from kvbus.bench.cases.large import measure_large
from kvbus.bench.cases.load import measure_load
from kvbus.bench.cases.priority import measure_priority
from kvbus.bench.cases.publishing import measure_chunked, measure_host
from kvbus.bench.cases.rate import measure_rate
from kvbus.bench.cases.reshapes import OF_NAIVE, PACKED_OF_NAIVE, measure_reshape
from kvbus.bench.cases.transfers import measure_fixed, measure_transfer
from kvbus.bench.engines import Bench
from kvbus.bench.figures import CaseName, Figure, Scale
from kvbus.bench.processes import agent, answering
from kvbus.bench.shapes import (
    BIG,
    HND_1,
    LAYERED,
    MLA_1,
    MLA_2,
    NHD_1,
    NHD_2,
    NHD_64,
    contiguous,
    scattered,
)
from kvbus.console import Console
from kvbus.errors import KVBusError

Case = Callable[[Bench, Scale], Awaitable[list[Figure]]]
Measured = MutableMapping[CaseName, Sequence[Figure]]

CASES: Mapping[CaseName, Case] = {
    CaseName.CONTIGUOUS_64M: partial(
        measure_transfer, shape=BIG, num_mib=64, blocks=contiguous, of_raw=1.2, unmapped_of_raw=0.85
    ),
    CaseName.CONTIGUOUS_256M: partial(
        measure_transfer,
        shape=BIG,
        num_mib=256,
        blocks=contiguous,
        of_raw=1.2,
        unmapped_of_raw=0.95,
    ),
    CaseName.SCATTERED_256K: partial(
        measure_transfer, shape=BIG, num_mib=64, blocks=scattered, of_raw=1.2, unmapped_of_raw=0.85
    ),
    CaseName.SCATTERED_16K: partial(
        measure_transfer,
        shape=LAYERED,
        num_mib=64,
        blocks=scattered,
        of_raw=1.5,
        unmapped_of_raw=0.85,
    ),
    CaseName.FIXED: measure_fixed,
    CaseName.LOAD: measure_load,
    CaseName.PRIORITY: measure_priority,
    CaseName.IDLE: measure_idle,
    CaseName.RATE: measure_rate,
    CaseName.TP_1_TO_2: partial(
        measure_reshape,
        source=NHD_1,
        target=NHD_2,
        of_naive=OF_NAIVE,
        packed_of_naive=PACKED_OF_NAIVE,
    ),
    CaseName.TP_2_TO_1: partial(measure_reshape, source=NHD_2, target=NHD_1, of_naive=OF_NAIVE),
    CaseName.HND_TO_NHD: partial(measure_reshape, source=HND_1, target=NHD_1, of_naive=OF_NAIVE),
    CaseName.BLOCK_64_TO_16: partial(measure_reshape, source=NHD_64, target=NHD_1),
    CaseName.MLA: partial(measure_reshape, source=MLA_2, target=MLA_1),
    CaseName.CHUNKED: measure_chunked,
    CaseName.HOST: measure_host,
    CaseName.MEMORY: measure_memory,
    CaseName.LARGE: measure_large,
}


def run_cases(names: Sequence[CaseName], scale: Scale, measured: Measured) -> None:
    """Measure the cases; raises `KVBusError`, alone or in groups, when a handoff fails.

    What was ``measured`` is there also when this raises.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
        anyio.run(_run, names, scale, measured, Path(folder), Console(stderr=True))


async def _run(
    names: Sequence[CaseName], scale: Scale, measured: Measured, folder: Path, console: Console
) -> None:
    with running(folder, console) as bench:
        for name in names:
            with console.status(f"measuring {name}"):
                measured[name] = await CASES[name](bench, scale)


@contextmanager
def running(folder: Path, console: Console) -> Iterator[Bench]:
    """Agents and the prefill engines' process; a failed run shows the end of the agents' logs."""
    with agent("prefill", folder) as prefill, agent("decode", folder) as decode:
        try:
            module, path = "kvbus.bench.prefill_engine", str(prefill.attach_path)
            with ExitStack() as stack:
                engines = answering("prefill engine", module, path, folder=folder)
                agents = {"prefill agent": prefill, "decode agent": decode}
                yield Bench(agents, stack.enter_context(engines), folder, stack)
        except* KVBusError:
            for one in (prefill, decode):
                console.print(one.child.lost("runs"))
            raise
