"""The cases of the benchmark, one module each: what is done, and the figures that come of it.

Refuses to print.
"""

from collections.abc import Awaitable, Callable, Mapping

from kvbus.bench.case_names import CaseName
from kvbus.bench.cases.chunked import measure_chunked
from kvbus.bench.cases.fixed import measure_fixed
from kvbus.bench.cases.host import measure_host
from kvbus.bench.cases.idle import measure_idle
from kvbus.bench.cases.load import measure_load
from kvbus.bench.cases.rate import measure_rate
from kvbus.bench.cases.reshapes import RESHAPES, measure_reshape
from kvbus.bench.cases.transfers import TRANSFERS, measure_transfer
from kvbus.bench.effort import Effort
from kvbus.bench.engines import Bench
from kvbus.bench.figures import Figure

Case = Callable[[Bench, Effort], Awaitable[list[Figure]]]

CASES: Mapping[CaseName, Case] = {
    **{CaseName(transfer.name): measure_transfer(transfer) for transfer in TRANSFERS},
    CaseName.FIXED: measure_fixed,
    CaseName.LOAD: measure_load,
    CaseName.IDLE: measure_idle,
    CaseName.RATE: measure_rate,
    **{CaseName(reshape.name): measure_reshape(reshape) for reshape in RESHAPES},
    CaseName.CHUNKED: measure_chunked,
    CaseName.HOST: measure_host,
}
