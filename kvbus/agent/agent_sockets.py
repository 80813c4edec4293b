"""The ZeroMQ sockets of an agent: where they are bound, and who may ask there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog

from kvbus.agent.access import Access
from kvbus.agent.config import AgentConfig
from kvbus.agent.observe import AgentMetrics, Refusals
from kvbus.bus import BusContext, Call, EventPublisher, RequestServer
from kvbus.errors import ConfigError
from kvbus.memory.attach import AttachServer
from kvbus.memory.attach.path import ENGINE_SOCKET

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AgentSockets:
    """For local engines, for other agents, and for who watches."""

    engine: RequestServer
    peer: RequestServer
    events: EventPublisher

    @classmethod
    def bind(
        cls,
        context: BusContext,
        config: AgentConfig,
        boot: str,
        *,
        folder: Path,
        access: Access,
        metrics: AgentMetrics,
        admit: Callable[[Call], None],
    ) -> Self:
        """Bind all; ``admit`` is the gate of the engine socket, which is in ``folder``."""

        def server(endpoint: str, **options: Any) -> RequestServer:
            return RequestServer(
                context,
                endpoint,
                boot=boot,
                on_fault=_log_fault,
                on_refusal=Refusals(metrics).of_call,
                **options,
            )

        engine = server(f"ipc://{folder / ENGINE_SOCKET}", gate=admit)
        with _bound_by("peer_bind"):
            peer = server(
                config.peer_bind,
                gate=access.gate,
                options=access.peer_options(),
            )
        with _bound_by("events_bind"):
            events = EventPublisher(
                context,
                config.events_bind,
                boot=boot,
                heartbeat_s=config.heartbeat_s,
                options=access.events_options(),
            )
        return cls(engine=engine, peer=peer, events=events)

    @property
    def ports(self) -> set[int]:
        """Of TCP."""
        return {int(one.endpoint.rpartition(":")[2]) for one in (self.peer, self.events)}


@contextmanager
def _bound_by(key: str) -> Iterator[None]:
    """An address that cannot be bound is told with its key."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"key '{key}': {error.message}", key=key) from error


def _log_fault(error: Exception, call: Call) -> None:
    log.error("request.failed", op=call.op, peer=call.session.boot[:8], exc_info=error)


BUS_READINGS = {
    "malformed_messages": "Frames that were no message, on any socket.",
    "bus_busy": "Requests that were refused because too many were pending.",
    "bus_repeats": "Requests that came again, by a new connection, while they were in progress.",
    "peer_pings": "Signs of life that other agents have asked for.",
    "replies_dropped": "Replies whose peer was gone.",
    "attach_refused": "Connections to the attach socket that were turned away.",
}


def bus_readings(
    engine: RequestServer, peer: RequestServer, attach: AttachServer
) -> dict[str, float]:
    """The readings named in `BUS_READINGS`, for both request sockets together."""
    servers = (engine.counters, peer.counters)
    refused = attach.counts.num_refused_users + attach.counts.num_refused_busy
    return {
        "malformed_messages": sum(c.malformed for c in servers) + attach.counts.num_malformed,
        "bus_busy": sum(c.busy for c in servers),
        "bus_repeats": sum(c.repeats_absorbed for c in servers),
        "peer_pings": peer.counters.pings,
        "replies_dropped": sum(c.replies_dropped for c in servers),
        "attach_refused": refused,
    }
