"""Owns the measurement of an agent's rates, once, at its start.

Refuses to keep an agent from starting: what cannot be measured is taken from the defaults.
"""

import os
from dataclasses import asdict
from typing import Any

import anyio
import structlog

from kvbus.errors import KVBusError
from kvbus.planning.cost import Rates
from kvbus.transport.calibration import measure_reads

log = structlog.get_logger()


async def calibrated_rates(name: str, *, slots_in_flight: int) -> Rates:
    """Rates of this machine, measured in a worker thread in some 0.2 s once torch is imported.

    ``name`` is the NIXL agent's, which contains the boot id.
    """
    measured: dict[str, Any] = {}
    for part, measure in (("reads", lambda: measure_reads(name)), ("copies", _measure_copies)):
        try:
            measured |= asdict(await anyio.to_thread.run_sync(measure))
        except KVBusError as error:
            log.warning("rates.defaulted", part=part, code=error.code.value, error=str(error))
    rates = Rates(num_cores=_num_cores(), slots_in_flight=slots_in_flight, **measured)
    log.info("rates.measured", **asdict(rates))
    return rates


def _measure_copies() -> Any:
    from kvbus.memory.copy_rates import measure_copies  # noqa: PLC0415  # imports torch: seconds

    return measure_copies()


def _num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
