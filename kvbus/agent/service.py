"""What a service adds to the runtime that both agents share, and what it is given: an `Agent`."""

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
from kvbus.agent.spans import Stories
from kvbus.bus import BusContext, EventPublisher, Handlers
from kvbus.data.client import DataProcess
from kvbus.data.messages import Cut
from kvbus.errors import ErrorCode, LocalError
from kvbus.memory.attach import Lifeline
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.attach import Welcome
from kvbus.protocol.tools import Cost, PeerView, Predicted, Sharing
from kvbus.table import Driver, Table
from kvbus.table.events import DrainStarted

if TYPE_CHECKING:
    from kvbus.agent.otlp import SpanSender


@dataclass(slots=True, kw_only=True)
class Agent:
    """What a service may use of its agent; those parts that are not given are made by its start.

    ``folder`` is for sockets of its own. ``sender`` takes what has ended where a collector wants
    spans.
    """

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
    """The part of an agent that is its own: offers and leases, or fetches and peers.

    Its handoffs are the entries of ``table``, which ``driver`` feeds. Handlers may raise a
    `KVBusError`, which refuses the request. What a service knows of other agents is nothing, unless
    it asks some.
    """

    def __init__(
        self,
        agent: Agent,
        table: Table[Any, Any, Any, Any],
        driver: Driver[Any],
        stories: Stories[Any],
    ) -> None:
        self._agent, self._driver, self._live = agent, driver, table.live
        self.stories = stories
        """What happened to them."""

    async def start(self) -> None:
        """Open what is its own; awaited before anybody can ask for anything."""
        raise NotImplementedError

    def engine_handlers(self) -> Handlers:
        """For requests of a local engine, other than registration."""
        raise NotImplementedError

    def peer_handlers(self) -> Handlers:
        """For requests on the peer socket."""
        raise NotImplementedError

    def start_draining(self) -> None:
        """Refuse new work from now on; what is live goes on."""
        self._driver.dispatch(DrainStarted())

    async def drained(self) -> None:
        """Return when nothing runs any more; only awaited once draining has started."""
        await until(lambda: not self._live)

    def stop(self) -> None:
        """Fail what still runs."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """What the agent holds, for `Status` and for metrics."""
        raise NotImplementedError

    def sharing(self) -> Sharing:
        """What memory it lends to others of this machine, or maps of theirs."""
        raise NotImplementedError

    def on_cut(self, cut: Cut) -> None:
        """Handle that another agent's memory, mapped by the data process, was truncated."""

    def silent_peers(self) -> dict[tuple[str, str], float]:
        """Agents that do not answer, by endpoint and CURVE key, and for how many seconds."""
        return {}

    def view(self, endpoint: str) -> PeerView:
        """What it knows of another agent; who it is itself is not in it."""
        return PeerView()

    def cost(self, asked: Cost) -> Predicted:
        """What a fetch would take now; raises `LocalError`."""
        raise LocalError("only decode agents know what a handoff costs", code=ErrorCode.INVALID)
