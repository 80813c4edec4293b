"""The cases of the benchmark: what is done, and the figures that come of it."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from kvbus.bench.case_names import CaseName
from kvbus.bench.cases.idle import measure_idle, measure_memory
from kvbus.bench.cases.load import measure_load
from kvbus.bench.cases.micro import measure_planning, measure_rates
from kvbus.bench.cases.publishing import measure_chunked, measure_host
from kvbus.bench.cases.rate import measure_rate
from kvbus.bench.cases.reshapes import RESHAPES, measure_reshape
from kvbus.bench.cases.transfers import TRANSFERS, measure_fixed, measure_transfer
from kvbus.bench.engines import Bench
from kvbus.bench.figures import Figure
from kvbus.bench.scale import Scale

Case = Callable[[Bench, Scale], Awaitable[list[Figure]]]

CASES: Mapping[CaseName, Case] = {
    **{CaseName(transfer.name): partial(measure_transfer, transfer) for transfer in TRANSFERS},
    CaseName.FIXED: measure_fixed,
    CaseName.LOAD: measure_load,
    CaseName.IDLE: measure_idle,
    CaseName.RATE: measure_rate,
    **{CaseName(reshape.name): partial(measure_reshape, reshape) for reshape in RESHAPES},
    CaseName.CHUNKED: measure_chunked,
    CaseName.HOST: measure_host,
    CaseName.MEMORY: measure_memory,
    CaseName.PLANNING: measure_planning,
    CaseName.RATES: measure_rates,
}
