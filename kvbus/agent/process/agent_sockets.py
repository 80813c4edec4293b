"""The ZeroMQ sockets of an agent: where they are bound, and who may ask there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog

from kvbus.agent.process.access import Access
from kvbus.agent.process.config import AgentConfig
from kvbus.agent.process.connection_bounds import ConnectionBounds
from kvbus.agent.process.metrics import AgentMetrics
from kvbus.agent.process.refusals import Refusals
from kvbus.bus import BusContext, Call, EventPublisher, RequestServer, ServerLimits
from kvbus.errors import ConfigError
from kvbus.memory.attach.seat import ENGINE_SOCKET

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
        watch: ConnectionBounds,
        admit: Callable[[Call], None],
    ) -> Self:
        """Bind all; ``admit`` is the gate of the engine socket, which is in ``folder``."""

        def server(endpoint: str, **options: Any) -> RequestServer:
            return RequestServer(
                context,
                endpoint,
                boot=boot,
                on_fault=_log_fault,
                on_refusal=Refusals(metrics, lines_s=config.max_refusal_lines_s).of_call,
                limits=ServerLimits(max_reply_bytes=config.max_reply_bytes),
                **options,
            )

        engine = server(f"ipc://{folder / ENGINE_SOCKET}", gate=admit)
        with _bound_by("peer_bind"):
            peer = server(
                config.peer_bind,
                gate=access.gate,
                options=access.peer_options(),
                watch=watch.peer_socket(),
            )
        with _bound_by("events_bind"):
            events = EventPublisher(
                context,
                config.events_bind,
                boot=boot,
                heartbeat_s=config.heartbeat_s,
                options=access.events_options(),
                watch=watch.events_socket(),
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
