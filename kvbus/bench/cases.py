"""The cases of ``kvbus bench``: agents and engines up, the cases in turn, everything down."""

import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio

from kvbus.bench.figures import CaseName, Figure, Scale
from kvbus.bench.handoffs import (
    measure_chunked,
    measure_fixed,
    measure_host,
    measure_reshape,
    measure_transfer,
)
from kvbus.bench.load import (
    measure_idle,
    measure_large,
    measure_load,
    measure_memory,
    measure_priority,
    measure_rate,
)
from kvbus.bench.pairs import Bench, running
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
from kvbus.errors import KVBusError

Show = Callable[[CaseName, Sequence[Figure]], None]

CASES: Mapping[CaseName, Callable[[Bench, Scale], Awaitable[list[Figure]]]] = {
    CaseName.CONTIGUOUS_64M: partial(
        measure_transfer, shape=BIG, num_mib=64, blocks=contiguous, of_raw=1.2, unmapped=0.85
    ),
    CaseName.CONTIGUOUS_256M: partial(
        measure_transfer, shape=BIG, num_mib=256, blocks=contiguous, of_raw=1.2, unmapped=0.95
    ),
    CaseName.SCATTERED_256K: partial(
        measure_transfer, shape=BIG, num_mib=64, blocks=scattered, of_raw=1.2, unmapped=0.85
    ),
    CaseName.SCATTERED_16K: partial(
        measure_transfer, shape=LAYERED, num_mib=64, blocks=scattered, of_raw=1.5, unmapped=0.85
    ),
    CaseName.FIXED: measure_fixed,
    CaseName.LOAD: measure_load,
    CaseName.PRIORITY: measure_priority,
    CaseName.IDLE: measure_idle,
    CaseName.RATE: measure_rate,
    CaseName.TP_1_TO_2: partial(
        measure_reshape, source=NHD_1, target=NHD_2, of_naive=8.0, packed_of_naive=6.0
    ),
    CaseName.TP_2_TO_1: partial(measure_reshape, source=NHD_2, target=NHD_1, of_naive=8.0),
    CaseName.HND_TO_NHD: partial(measure_reshape, source=HND_1, target=NHD_1, of_naive=8.0),
    CaseName.BLOCK_64_TO_16: partial(measure_reshape, source=NHD_64, target=NHD_1),
    CaseName.MLA: partial(measure_reshape, source=MLA_2, target=MLA_1),
    CaseName.CHUNKED: measure_chunked,
    CaseName.HOST: measure_host,
    CaseName.MEMORY: measure_memory,
    CaseName.LARGE: measure_large,
}


def run_cases(names: Sequence[CaseName], scale: Scale, show: Show) -> None:
    """Measure the cases, and ``show`` the figures of each at once.

    Raises `KVBusError`, alone or in groups, when a handoff fails; the end of the agents' logs is
    shown then.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
        anyio.run(_run, names, scale, show, Path(folder))


async def _run(names: Sequence[CaseName], scale: Scale, show: Show, folder: Path) -> None:
    async with running(folder) as bench:
        try:
            for name in names:
                sys.stderr.write(f"measuring {name}\n")
                show(name, await CASES[name](bench, scale))
        except* KVBusError:
            for one in bench.agents.values():
                sys.stderr.write(f"{one.child.lost('runs')}\n")
            raise
