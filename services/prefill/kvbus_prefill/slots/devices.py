"""The slots of a prefill agent, place by place: one table each, driven, with ids that they share.

Refuses to say who may have a slot; that is the table's. A place without slots has no table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from kvbus.agent.process.service import Agent
from kvbus.agent.staging.slot_memory import SlotMemory
from kvbus.table.driver import Driver
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.slots import events as ev
from kvbus_prefill.slots.table import SlotTable

Execute = Callable[[SlotMemory, ev.Command], None]


@dataclass(frozen=True, slots=True)
class _Place:
    table: SlotTable
    driver: Driver[ev.Event, ev.Command]


class SlotDevices:
    """All tables; ``execute`` is given the memory that a command's slot is of."""

    def __init__(self, agent: Agent, config: PrefillConfig, execute: Execute) -> None:
        self._agent, self._config, self._execute = agent, config, execute
        self._places: dict[str, _Place] = {}
        self._ids = count(1)

    def dispatch(self, place: str, event: ev.Event) -> None:
        """Apply an event to the table of one place; raises `LocalError` when it has no slots."""
        known = self._places.get(place) or self._make(place)
        known.driver.dispatch(event)

    def dispatch_all(self, event: ev.Event) -> None:
        """Apply an event to every table."""
        for known in list(self._places.values()):
            known.driver.dispatch(event)

    def stop(self) -> None:
        """Refuse what waits."""
        self.dispatch_all(ev.Stopped())
        for known in self._places.values():
            known.driver.stop()

    def counts(self) -> dict[str, int]:
        """Boxes that wait, and slots in use."""
        tables = [known.table for known in self._places.values()]
        return {
            "packs": sum(table.num_waiting for table in tables),
            "slots": sum(table.num_slots_in_use for table in tables),
        }

    def _make(self, place: str) -> _Place:
        memory = self._agent.staging.at(place)
        table = SlotTable(self._config.slot_limits(num_slots=memory.num_slots), self._ids)
        driver: Driver[ev.Event, ev.Command] = Driver(
            table,
            dict.fromkeys(
                (ev.StartGather, ev.ReplyPacked, ev.Refuse), partial(self._execute, memory)
            ),
            deadline_passed=ev.DeadlinePassed(),
            on_settled=lambda: None,
            loop=self._agent.loop,
        )
        self._places[place] = made = _Place(table, driver)
        return made
