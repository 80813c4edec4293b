"""The slots of a prefill agent, device by device: one table each, with ids that they share."""

from collections.abc import Callable, Hashable, Mapping
from itertools import count
from typing import Any

from kvbus.agent.process.service import Agent
from kvbus.agent.staging.slot_memory import SlotMemory
from kvbus.table import Driver
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.slots import events as ev
from kvbus_prefill.slots.table import SlotTable

MakeCommands = Callable[[SlotMemory], Mapping[type[Any], Callable[[Any], None]]]


class SlotDevices:
    """All tables; ``commands`` are what is done for one of them, given its memory."""

    def __init__(self, agent: Agent, config: PrefillConfig, commands: MakeCommands) -> None:
        self._agent, self._config, self._commands = agent, config, commands
        self._devices: dict[str, tuple[SlotTable, Driver[ev.Event, ev.Command]]] = {}
        self._ids = count(1)

    def dispatch(self, device: str, event: ev.Event) -> None:
        """Apply an event to the table of one device; raises `LocalError` when it has no slots."""
        _, driver = self._devices.get(device) or self._make(device)
        driver.dispatch(event)

    def dispatch_all(self, event: ev.Event) -> None:
        """Apply an event to every table."""
        for _, driver in list(self._devices.values()):
            driver.dispatch(event)

    def end_lease(self, lease: Hashable) -> None:
        """Nothing that was gathered under this lease is valid any more."""
        for table, driver in self._devices.values():
            if table.has_lease(lease):
                driver.dispatch(ev.LeaseEnded(lease))

    def stop(self) -> None:
        """Refuse what waits."""
        self.dispatch_all(ev.Stopped())
        for _, driver in self._devices.values():
            driver.stop()

    def counts(self) -> dict[str, int]:
        """Boxes that wait, and slots in use."""
        tables = [table for table, _ in self._devices.values()]
        return {
            "packs": sum(table.num_waiting for table in tables),
            "slots": sum(table.num_slots_in_use for table in tables),
        }

    def _make(self, device: str) -> tuple[SlotTable, Driver[ev.Event, ev.Command]]:
        memory = self._agent.staging.at(device)
        table = SlotTable(self._config.slot_limits(num_slots=memory.num_slots), self._ids)
        driver: Driver[ev.Event, ev.Command] = Driver(
            table, deadline_passed=ev.DeadlinePassed(), loop=self._agent.loop
        )
        driver.commands = self._commands(memory)
        self._devices[device] = table, driver
        return table, driver
