"""Owns the rates of an agent's machine: the defaults at first, then what was measured.

What cannot be measured stays at its default.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import structlog

from kvbus.agent.process.loop import in_thread
from kvbus.errors import KVBusError
from kvbus.planning.cost import Rates
from kvbus.transport.calibration import measure_reads

log = structlog.get_logger()


class Calibration:
    """Measures in worker threads: reads once NIXL is open, copies once there is one to make.

    Copies to and from slots need torch, which most agents never import. So the choice of a path
    begins with default rates of copies; `Rates` that differ a little choose the same path in most
    cases, and where they do not, `PeerRates` corrects them by what fetches take. ``on_change``
    follows each measurement.
    """

    def __init__(self, *, slots_in_flight: int, on_change: Callable[[], None]) -> None:
        self.rates = Rates(num_cores=_num_cores(), slots_in_flight=slots_in_flight)
        self._on_change = on_change
        self.reads_asked = self.copies_asked = False

    async def measure_reads(self, name: str) -> None:
        """Takes some 0.2 s; ``name`` is the NIXL agent's, which contains the boot id.

        A second call changes nothing.
        """
        if self.reads_asked:
            return
        self.reads_asked = True
        await self._measure("reads", partial(measure_reads, name))

    async def measure_copies(self) -> None:
        """Takes some 0.1 s once torch is imported; a second call changes nothing."""
        if self.copies_asked:
            return
        self.copies_asked = True
        await self._measure("copies", _measure_copies)

    async def _measure(self, part: str, measure: Callable[[], Any]) -> None:
        try:
            measured = asdict(await in_thread(measure))
        except KVBusError as error:
            log.warning("rates.defaulted", part=part, code=error.code.value, error=str(error))
            return
        self.rates = replace(self.rates, **measured)
        self._on_change()
        log.info("rates.measured", part=part, **asdict(self.rates))


def _measure_copies() -> Any:
    from kvbus.memory.copy_rates import measure_copies  # noqa: PLC0415  # imports torch: seconds
    from kvbus.memory.copying import copy_on_one_thread  # noqa: PLC0415

    copy_on_one_thread()  # first: what follows gives torch back the threads that it found
    return measure_copies()


def _num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
