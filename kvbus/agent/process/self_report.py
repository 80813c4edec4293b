"""What an agent says of itself: what it holds, and whether it can take work."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from msgspec import structs

from kvbus.agent.process.config import AgentConfig
from kvbus.agent.process.ending import Ending
from kvbus.agent.process.faults import current_faults
from kvbus.agent.process.handover import Handover
from kvbus.agent.process.service import Agent, Service
from kvbus.agent.process.takeover import Predecessor
from kvbus.agent.process.tracing import traced
from kvbus.keys.roles import Role
from kvbus.keys.shell import key_options
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.live import Fault, Live
from kvbus.protocol.peer import AgentStatus, Status
from kvbus.protocol.peer_view import PeerView
from kvbus.protocol.trace import Trace, Traced

MOST_RECENT = 100
"""Handoffs that one look has: each takes some 0.02 ms, of the loop only while it is under way."""


def without_place(status: AgentStatus) -> AgentStatus:
    """What anybody may hear: not where NIXL listens, nor the user, namespaces and paths."""
    return structs.replace(status, data_endpoints=(), sharing=None)


@dataclass(slots=True)
class SelfReport:
    """Of one agent, whose ``predecessor`` is the one that it has replaced; asked in its loop."""

    config: AgentConfig
    agent: Agent
    service: Service
    handover: Handover
    ending: Ending
    predecessor: Predecessor | None = None
    is_started: bool = False

    def status(self, asked: Status) -> AgentStatus:
        """What it holds now, and the story of what is asked for."""
        engines, before = self.agent.engines.engines, self.predecessor
        return AgentStatus(
            agent_id=self.config.agent_id,
            role=self.agent.identity.role,
            engines={name: engine.ready for name, engine in engines.items()},
            draining=self.ending.is_draining,
            counts=self.service.counts(),
            data_endpoints=self.agent.data_plane.endpoints,
            story=tuple(self.service.story(asked)),
            sharing=self.service.sharing(),
            successor=self.handover.successor,
            predecessor=before.peer_endpoint if before is not None and before.is_there else "",
            silent_peers=self.service.silent_peers(),
            engine_instances={name: engine.instance for name, engine in engines.items()},
            peer_endpoint=self.agent.identity.peer_endpoint,
            events_endpoint=self.agent.identity.events_endpoint,
            echo=asked.echo,
            view=self._view(asked) if asked.peer or asked.key else None,
        )

    def trace(self, asked: Trace) -> Traced:
        """What it remembers of a request, as spans."""
        return traced(self.agent.identity, self.service, asked)

    def unready(self) -> list[Fault]:
        """Why it should be given no work now; empty when it should."""
        return list(self._reasons())

    def live(self) -> Callable[[Mapping[str, float]], Live]:
        """Everything of now, and its newest offers or fetches, `MOST_RECENT` at most.

        What is returned takes the metrics, and makes the rest of it in any thread.
        """
        status, recent = without_place(self.status(Status())), self.service.recent(MOST_RECENT)
        reasons = (*self._reasons(), *self._key_faults())
        key_file, key_of = self.config.key_file, self.service.key_of
        key_options_of = {at: key_options(key_file, key_of(at)) for at in status.silent_peers}
        now_s, wall_s = asyncio.get_running_loop().time(), time.time()
        is_linked = not self.agent.data_plane.is_down()

        def finish(metrics: Mapping[str, float]) -> Live:
            spans = tuple(tuple(make_spans()) for make_spans in recent)
            faults = current_faults(
                status,
                metrics,
                spans,
                now_s=now_s,
                wall_s=wall_s,
                is_linked=is_linked,
                key_options=key_options_of,
            )
            return Live(
                status=status,
                boot=self.agent.identity.boot,
                now_s=now_s,
                faults=(*reasons, *faults),
                metrics=dict(metrics),
                recent=spans,
                key_options=key_options(key_file, self.agent.identity.server_key),
            )

        return finish

    def _view(self, asked: Status) -> PeerView:
        return structs.replace(
            self.service.view(asked.peer),
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            server_key=self.agent.identity.server_key,
            roles=self.agent.access.roles_of(asked.key),
        )

    def _key_faults(self) -> Iterator[Fault]:
        if self.agent.identity.role is AgentRole.PREFILL and self.agent.access.has_lost(
            Role.PREFILL
        ):
            key, name = self.agent.identity.server_key, self.config.agent_id
            yield Fault(
                f"our own key is not among the trusted keys of {self.config.authorized_keys} as "
                "prefill: decode agents that share the folder refuse us",
                "Trust it there, or where the folder is made: "
                f"kvbus keys trust FOLDER '{key}' --name {name} --role prefill",
            )

    def _reasons(self) -> Iterator[Fault]:
        if not self.is_started:
            yield Fault("the agent is starting", "Wait.")
        if self.ending.is_draining:
            yield Fault("the agent is draining, and ends soon", "Use another one.")
        if self.handover.successor:
            yield Fault(f"the agent is replaced by {self.handover.successor}", "Ask that one.")
        if outside := self.agent.data_plane.outside:
            yield Fault(
                f"UCX listens at {outside}, which data_interfaces does not allow",
                "See to the UCX_ settings of the environment: strangers can read memory there.",
            )
        if self.agent.data_plane.is_down():
            yield Fault("none of data_interfaces has a link", "See to the cable or the interface.")
        engines = self.agent.engines.engines.values()
        if self.config.ready_needs_engine and not any(engine.ready for engine in engines):
            yield Fault("no engine is attached", "Start one; the agent's log says who was refused.")
