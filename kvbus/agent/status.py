"""What an agent says of itself: what it holds, whether it can take work, and what is wrong now."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from kvbus.agent.config import AgentConfig
from kvbus.agent.service import Agent, Service
from kvbus.keys.files import key_options
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.message import Role
from kvbus.protocol.status import AgentStatus, Fault, Live, PeerView, Status
from kvbus.protocol.trace import MAX_OTHERS, Span, Trace, Traced

ADVICE = {
    "peer_unreachable": "See that the prefill agent runs, and that its advertise_host and port are "
    "reached from here: kvbus doctor --peer.",
    "stale": "The prefill side was restarted: route these requests again.",
    "lease_expired": "See to the lag and the log of the prefill agent; it may be stopped.",
    "timeout": "See to the lag and the log of the prefill agent; where no bytes come at all, run "
    "kvbus doctor --peer here.",
    "peer_lost": "The prefill agent died: start it, and route these requests again.",
    "engine_lost": "The prefill engine died or left: route these requests again.",
    "transfer_failed": "See to the network of data_interfaces and to UCX: kvbus doctor --peer.",
    "digest_mismatch": "Bytes were changed on the way: test the memory and the NICs of both sides.",
    "forbidden": "A key or a ticket is not trusted: compare kvbus keys show on both sides.",
    "offer_expired": "The decode side comes too late: see to its queue, or raise offer_ttl_s.",
    "incompatible": "The two engines cannot exchange KV: make equal what the reason names.",
    "busy": "A bound was reached: raise it, or send less.",
    "draining": "The agent is stopping: use another one.",
}
OTHERWISE = "The log of both agents has the reason; kvbus trace ID shows where it happened."
NOBODYS = ("cancelled", "offer_withdrawn", "abandoned")
"""Codes of requests that were not wanted any more."""
OLD_S = 600.0
"""What was last wrong before that is no fault of now."""


def current_faults(
    status: AgentStatus,
    metrics: Mapping[str, float],
    recent: Sequence[Sequence[Span]],
    *,
    now_s: float,
    wall_s: float,
    is_linked: bool,
    key_options: Mapping[str, str],
) -> Iterator[Fault]:
    """Those of peers and of memory now, then those of the last minutes.

    ``recent`` has the spans of each of the last handoffs; ``now_s`` is on their clock, ``wall_s``
    are the seconds since 1970. ``is_linked`` says whether an interface of the agent has a link.
    ``key_options`` are what a command needs to ask a peer, by its endpoint.
    """
    refused = _refused(len(status.silent_peers), metrics.get("kvbus_silent_peer_refusals", 0.0))
    for endpoint, silent_s in status.silent_peers.items():
        options = key_options.get(endpoint, "")
        peer = f"--peer {quote(endpoint)}"
        look = f"--only peer {peer}{options}" if options else peer
        yield Fault(
            f"the agent at {endpoint} has not answered for {silent_s:.0f} s{refused}",
            f"See that it runs and is not stopped, then run here: kvbus doctor {look}",
        )
    if blocks := metrics.get("kvbus_quarantined_blocks"):
        yield Fault(
            f"{blocks:.0f} blocks are withheld, as a transfer can still write into them",
            "A prefill agent is stopped or cut off: let it go on, or end it; else they come back "
            "after quarantine_timeout_s."
            if is_linked
            else "This agent itself is cut off: they come back with the link.",
        )
    ago_s = wall_s - metrics.get("kvbus_recycled_timestamp_seconds", 0.0)
    if ago_s < OLD_S:
        times = metrics.get("kvbus_recycled_transports", 1.0)
        yield Fault(
            "transfers never ended, and NIXL was made anew, "
            f"last {_age(ago_s)} ago ({times:.0f} times since the start)",
            "See to the network between the agents, and to agents that were stopped (SIGSTOP) "
            "or cut off.",
        )
    yield from _failures([entry[0] for entry in recent if entry], now_s)


def _refused(num_silent: int, num_refused: float) -> str:
    """How many fetches that cost; of several agents only the sum is known."""
    if not num_refused:
        return ""
    whom = "it" if num_silent == 1 else f"{num_silent} such agents"
    return f", and {num_refused:.0f} fetches were refused for {whom}"


def _failures(handoffs: Sequence[Span], now_s: float) -> Iterator[Fault]:
    """One for each code, the most frequent first; the error of a handoff is CODE: MESSAGE."""
    by_code: dict[str, list[Span]] = {}
    for one in handoffs:
        if one.error:
            by_code.setdefault(one.error.partition(":")[0], []).append(one)
    for code, failed in sorted(by_code.items(), key=lambda item: -len(item[1])):
        last = max(failed, key=_ended_at)
        ago_s = now_s - _ended_at(last)
        if code not in NOBODYS and ago_s < OLD_S:
            yield Fault(
                f"{len(failed)} of the last {len(handoffs)} handoffs failed, "
                f"last {_age(ago_s)} ago, with {last.error}",
                ADVICE.get(code, OTHERWISE),
            )


def _ended_at(span: Span) -> float:
    return span.start_s if span.end_s is None else span.end_s


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


MOST_RECENT = 100
"""Handoffs that one look has: each takes some 0.02 ms, of the loop only while it is under way."""


def without_place(status: AgentStatus) -> AgentStatus:
    """What anybody may hear: not where NIXL listens, nor the user, namespaces and paths."""
    return structs.replace(status, data_endpoints=(), sharing=None)


@dataclass(slots=True)
class SelfReport:
    """Of one agent; asked in its loop."""

    config: AgentConfig
    agent: Agent
    service: Service
    is_started: bool = False
    is_draining: bool = False

    def status(self, asked: Status) -> AgentStatus:
        """What it holds now, and the story of what is asked for."""
        engines = self.agent.engines.engines
        return AgentStatus(
            agent_id=self.config.agent_id,
            role=self.agent.identity.role,
            engines={name: engine.ready for name, engine in engines.items()},
            draining=self.is_draining,
            counts=self.service.counts(),
            data_endpoints=self.agent.data_plane.endpoints,
            story=tuple(self.service.story(asked)),
            sharing=self.service.sharing(),
            silent_peers=self.service.silent_peers(),
            engine_instances={name: engine.instance for name, engine in engines.items()},
            peer_endpoint=self.agent.identity.peer_endpoint,
            events_endpoint=self.agent.identity.events_endpoint,
            echo=asked.echo,
            view=self._view(asked) if asked.peer or asked.key else None,
        )

    def trace(self, asked: Trace) -> Traced:
        """What it remembers of a request, as spans."""
        identity, remembered = self.agent.identity, self.service.spans(asked)
        spans, cut = remembered.newest()
        return Traced(
            agent_id=identity.agent_id,
            role=identity.role,
            boot=identity.agent_boot,
            now_s=asyncio.get_running_loop().time(),
            wall_s=time.time(),
            spans=spans,
            cut=cut,
            others=remembered.others[-MAX_OTHERS:],
        )

    def unready(self) -> list[Fault]:
        """Why it should be given no work now; empty when it should."""
        return list(self._reasons())

    def live(self, registry: CollectorRegistry) -> Callable[[], Live]:
        """Everything of now, and its newest offers or fetches, `MOST_RECENT` at most.

        What is returned makes the rest of it in any thread.
        """
        families = list(registry.collect())
        status, recent = without_place(self.status(Status())), self.service.recent(MOST_RECENT)
        reasons = (*self._reasons(), *self._key_faults())
        key_file, key_of = self.config.key_file, self.service.key_of
        key_options_of = {at: key_options(key_file, key_of(at)) for at in status.silent_peers}
        now_s, wall_s = asyncio.get_running_loop().time(), time.time()
        is_linked = not self.agent.data_plane.is_down()

        def finish() -> Live:
            metrics = _samples(families)
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
                boot=self.agent.identity.agent_boot,
                now_s=now_s,
                faults=(*reasons, *faults),
                metrics=metrics,
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
        if self.is_draining:
            yield Fault("the agent is draining, and ends soon", "Use another one.")
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


def _samples(families: Iterable[Metric]) -> dict[str, float]:
    """Each sample by its name and labels, as the Prometheus page writes them."""
    samples: Iterable[Sample] = (one for family in families for one in family.samples)
    return {f"{one.name}{_labels(one)}": one.value for one in samples}


def _labels(sample: Sample) -> str:
    pairs = [f'{name}="{value}"' for name, value in sorted(sample.labels.items())]
    return f"{{{','.join(pairs)}}}" if pairs else ""
