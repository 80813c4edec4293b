"""The interface between the shared runtime (`Agent`) and a service (`Service`)."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio.abc import TaskGroup

from kvbus.agent.access import Access
from kvbus.agent.data_plane import DataPlane
from kvbus.agent.engines import EngineDirectory, EngineUser
from kvbus.agent.loop import until
from kvbus.agent.observe import AgentMetrics
from kvbus.agent.processes import ProcessReport
from kvbus.agent.slots import StagingDevices
from kvbus.agent.spans import Histories
from kvbus.bus import BusContext, EventPublisher, Handlers
from kvbus.data.client import DataProcess
from kvbus.data.messages import Cut
from kvbus.errors import ErrorCode, LocalError
from kvbus.memory.attach import Lifeline
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.attach import Welcome
from kvbus.protocol.tools import Cost, PeerView, Predicted, Sharing
from kvbus.table.events import DrainStarted
from kvbus.table.table import Driver, Table

if TYPE_CHECKING:
    from kvbus.agent.otlp import SpanSender


@dataclass(slots=True, kw_only=True)
class Agent:
    """The parts of an agent that its service may use; ``folder`` is for its sockets."""

    data: DataProcess
    tasks: TaskGroup
    staging: StagingDevices
    data_plane: DataPlane
    access: Access = field(default_factory=Access)
    lifeline: Lifeline = field(default_factory=Lifeline)
    bus_errors: BusErrors = field(default_factory=BusErrors)
    metrics: AgentMetrics = field(default_factory=AgentMetrics)
    context: BusContext = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)
    folder: Path = field(init=False)
    engines: EngineDirectory = field(init=False)
    identity: Welcome = field(init=False)
    processes: ProcessReport = field(init=False)
    publisher: EventPublisher = field(init=False)
    sender: "SpanSender | None" = None

    def __post_init__(self) -> None:
        self.processes = ProcessReport(self.data)


class Service(EngineUser):
    """The role-specific part of an agent: offers and leases, or fetches and peers.

    Its handoffs are the entries of ``table``; ``driver`` feeds events to it. A handler refuses a
    request by raising a `KVBusError`.
    """

    def __init__(
        self,
        agent: Agent,
        table: Table[Any, Any, Any, Any],
        driver: Driver[Any],
        histories: Histories[Any],
    ) -> None:
        self._agent, self._driver, self._live = agent, driver, table.live
        self.histories = histories

    async def start(self) -> None:
        """Open resources; awaited before any request arrives."""
        raise NotImplementedError

    def engine_handlers(self) -> Handlers:
        """Return handlers, except those for registration."""
        raise NotImplementedError

    def peer_handlers(self) -> Handlers:
        raise NotImplementedError

    def start_draining(self) -> None:
        self._driver.dispatch(DrainStarted())

    async def drained(self) -> None:
        """Return when no work is live; call it after `start_draining`."""
        await until(lambda: not self._live)

    def stop(self) -> None:
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        raise NotImplementedError

    def sharing(self) -> Sharing:
        raise NotImplementedError

    def on_cut(self, cut: Cut) -> None:
        """Handle the truncation of another agent's memory that the data process has mapped."""

    def silent_peers(self) -> dict[tuple[str, str], float]:
        """Return seconds of silence, by endpoint and CURVE key of the agent."""
        return {}

    def view(self, endpoint: str) -> PeerView:
        """Return the view of another agent, without its identity."""
        return PeerView()

    def cost(self, asked: Cost) -> Predicted:
        """Predict the cost of a fetch now; raises `LocalError`."""
        raise LocalError("only decode agents know what a handoff costs", code=ErrorCode.INVALID)
