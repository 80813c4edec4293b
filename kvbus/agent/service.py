"""The interface of the shared runtime and a service."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio.abc import TaskGroup

from kvbus.agent.access import Access
from kvbus.agent.data_plane import DataPlane
from kvbus.agent.engine_directory import EngineDirectory, EngineUser
from kvbus.agent.loop import until
from kvbus.agent.observe import AgentMetrics
from kvbus.agent.ordering import Ordering
from kvbus.agent.processes import ProcessReport
from kvbus.agent.spans import Histories
from kvbus.agent.staging_devices import StagingDevices
from kvbus.bus import BusContext, EventPublisher, Handlers
from kvbus.data.client import DataProcess
from kvbus.data.messages import Cut
from kvbus.errors import ErrorCode, LocalError
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.attach import Welcome
from kvbus.protocol.tools import Cost, Fault, PeerView, PoolStatus, Predicted, Sharing
from kvbus.table.events import DrainStarted
from kvbus.table.table import Driver, Table

if TYPE_CHECKING:
    from kvbus.agent.otlp import SpanSender


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    context: BusContext
    loop: asyncio.AbstractEventLoop
    tasks: TaskGroup
    metrics: AgentMetrics
    access: Access
    bus_errors: BusErrors
    data: DataProcess
    data_plane: DataPlane
    processes: ProcessReport
    staging: StagingDevices
    folder: Path
    identity: Welcome
    publisher: EventPublisher
    engines: EngineDirectory
    sender: "SpanSender | None"


class Service(EngineUser):
    """The role-specific part of an agent; handlers refuse a request by raising a `KVBusError`."""

    def __init__(
        self,
        agent: Agent,
        table: Table[Any, Any, Any, Any],
        driver: Driver[Any],
        histories: Histories[Any],
    ) -> None:
        self._agent, self._driver, self._live = agent, driver, table.live
        self.histories = histories
        self.ordering = Ordering(agent.loop)

    async def start(self) -> None:
        """Open resources, before any request arrives."""
        raise NotImplementedError

    def engine_handlers(self) -> Handlers:
        raise NotImplementedError

    def peer_handlers(self) -> Handlers:
        raise NotImplementedError

    def start_draining(self) -> None:
        self._driver.dispatch(DrainStarted())

    async def drained(self) -> None:
        await until(lambda: not self._live)

    def stop(self) -> None:
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        raise NotImplementedError

    def sharing(self) -> Sharing:
        raise NotImplementedError

    def on_cut(self, cut: Cut) -> None:
        """Handle the truncation of another agent's mapped memory."""

    def silent_peers(self) -> dict[tuple[str, str], float]:
        """Return seconds of silence, by endpoint and CURVE key."""
        return {}

    def faults(self) -> Iterable[Fault]:
        """Return the current faults that the service itself finds."""
        return ()

    def view(self, endpoint: str) -> PeerView:
        """Return the view of another agent, without its identity."""
        return PeerView()

    def pools(self) -> dict[str, PoolStatus]:
        """Return the pools of parked offers, by the engine id that readers use."""
        return {}

    def check_memory(self) -> None:
        """Check that a restarted data process has mapped this agent's own memory."""

    def cost(self, request: Cost) -> Predicted:
        raise LocalError("only decode agents know what a handoff costs", code=ErrorCode.INVALID)
