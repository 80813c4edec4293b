"""The status of an agent, and its current faults."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from shlex import quote

from msgspec import structs
from prometheus_client.metrics_core import Metric

from kvbus.agent.config import AgentConfig
from kvbus.agent.data_plane import is_one_machine
from kvbus.agent.observe import LOST_LINES
from kvbus.agent.service import Agent, Service
from kvbus.keys.files import key_options
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.message import Role
from kvbus.protocol.tools import MAX_OTHERS, AgentStatus, Fault, Live, Span, Status, Trace, Traced

ADVICE = {
    "peer_unreachable": "Check that the prefill agent runs, and that this host reaches its "
    "advertise_host and port: kvbus doctor --peer.",
    "stale": "The prefill engine or its agent was restarted repeatedly until the deadline: read "
    "their logs.",
    "lease_expired": "Check the lag and the log of the prefill agent; it may be stopped.",
    "timeout": "Check the lag and the log of the prefill agent; if no bytes arrive at all, run "
    "kvbus doctor --peer here.",
    "peer_lost": "The prefill agent was lost until the deadline: check that it runs.",
    "engine_not_ready": "The prefill engine did not reconnect to its agent: check that it runs.",
    "engine_lost": "The prefill engine died or left: route these requests again.",
    "transfer_failed": "Check the network of data_interfaces, and UCX: kvbus doctor --peer.",
    "digest_mismatch": "Bytes were changed on the way: test the memory and the NICs of both sides.",
    "forbidden": "A key or a ticket is not trusted: compare kvbus keys show on both sides.",
    "offer_expired": "The decode side is too late: check its queue, or raise offer_ttl_s.",
    "incompatible": "The two engines cannot exchange KV: make equal what the reason names.",
    "busy": "A bound was reached: raise it, or send less.",
    "draining": "The agent is stopping: use another one.",
}
OTHERWISE = "The log of both agents has the reason; kvbus trace ID shows where it happened."
USER_CANCELLED = ("cancelled", "offer_withdrawn", "abandoned")
OLD_S = 600.0


MAX_ERROR_CHARS = 1000
SILENT_S = 10.0
LIVE_S = 0.1
"""Maximum age of a `Live` response; concurrent requests share it."""
MOST_RECENT = 100


def without_place(status: AgentStatus) -> AgentStatus:
    return structs.replace(status, data_endpoints=(), sharing=None, faults=(), processes=())


@dataclass(slots=True)
class StatusReporter:
    config: AgentConfig
    agent: Agent
    service: Service
    is_started: bool = False
    is_draining: bool = False
    _live: tuple[float, Future[Live]] | None = None
    _maker: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "live"))

    def status(self, request: Status) -> AgentStatus:
        agent, service, view = self.agent, self.service, None
        if request.peer or request.key:
            view = structs.replace(
                service.view(request.peer),
                server_key=agent.identity.server_key,
                roles=agent.access.roles_of(request.key),
            )
        return AgentStatus(
            agent_id=agent.identity.agent_id,
            role=agent.identity.role,
            engines={name: engine.ready for name, engine in agent.engines.engines.items()},
            draining=self.is_draining,
            counts=service.counts(),
            data_endpoints=agent.data_plane.endpoints,
            history=tuple(service.histories.lines(request)),
            sharing=service.sharing(),
            silent_peers={at: silent_s for (at, _), silent_s in service.silent_peers().items()},
            engine_instances={n: engine.instance for n, engine in agent.engines.engines.items()},
            peer_endpoint=agent.identity.peer_endpoint,
            events_endpoint=agent.identity.events_endpoint,
            echo=request.echo,
            view=view,
            processes=agent.processes.processes(),
            pools=service.pools(),
        )

    def trace(self, request: Trace) -> Traced:
        identity, remembered = self.agent.identity, self.service.histories.remembered(request)
        spans, cut = remembered.newest()
        return Traced(
            agent_id=identity.agent_id,
            role=identity.role,
            boot=identity.agent_boot,
            now_s=self.agent.loop.time(),
            wall_s=time.time(),
            spans=spans,
            cut=cut,
            agents=remembered.agents[-MAX_OTHERS:],
        )

    def unready(self) -> list[Fault]:
        faults, plane, data = [], self.agent.data_plane, self.agent.data
        if not self.is_started:
            faults.append(Fault("the agent is starting", "Wait."))
        if self.is_draining:
            faults.append(Fault("the agent is draining, and ends soon", "Use another one."))
        if not data.is_running:
            what = f"the data process does not run: {data.problem}"
            do = "The agent restarts it after up to 10 s. Read its log and the kernel's."
            faults.append(Fault(what, do))
        elif data.nixl_error is not None and not is_one_machine(self.config):
            what = f"NIXL does not start: {data.nixl_error.message}"
            faults.append(Fault(what, "Check the network of data_interfaces: kvbus doctor."))
        elif plane.silent_s > SILENT_S:
            what = f"the data process has not answered for {plane.silent_s:.0f} s"
            faults.append(Fault(what, "Check whether it is stopped (SIGSTOP), or memory is short."))
        if plane.outside:
            what = f"UCX listens at {plane.outside}, which data_interfaces does not allow"
            do = "See to the UCX_ settings of the environment: strangers can read memory there."
            faults.append(Fault(what, do))
        if plane.is_down():
            what = "none of data_interfaces has a link"
            faults.append(Fault(what, "See to the cable or the interface."))
        engines = self.agent.engines.engines.values()
        if self.config.ready_needs_engine and not any(engine.ready for engine in engines):
            do = "Start one; the agent's log lists the refused ones."
            faults.append(Fault("no engine is attached", do))
        return faults

    def live(self) -> Future[Live]:
        now_s = self.agent.loop.time()
        if self._live is None or now_s >= self._live[0] + LIVE_S:
            self._live = now_s, self._maker.submit(self._collect())
        return self._live[1]

    def _collect(self) -> Callable[[], Live]:
        families = list(self.agent.metrics.registry.collect())
        recent = self.service.histories.recent(MOST_RECENT)
        full, key_file = self.status(Status()), self.config.key_file
        status = structs.replace(without_place(full), processes=full.processes)
        server_key, silent = self.agent.identity.server_key, self.service.silent_peers()
        key_options_of = {endpoint: key_options(key_file, key) for endpoint, key in silent}
        faults = [*self.unready(), *self._key_faults(), *self.service.faults(), *_log_faults()]
        now_s, wall_s = self.agent.loop.time(), time.time()

        def make_live() -> Live:
            live = Live(
                status=status,
                boot=self.agent.identity.agent_boot,
                now_s=now_s,
                metrics=dict(_samples(families)),
                recent=tuple(tuple(make_spans()) for make_spans in recent),
                key_options=key_options(key_file, server_key),
            )
            found = current_faults(live, wall_s=wall_s, key_options=key_options_of)
            with_faults = structs.replace(status, faults=(*faults, *found))
            return structs.replace(live, status=with_faults)

        return make_live

    def _key_faults(self) -> Iterator[Fault]:
        identity, file = self.agent.identity, self.config.authorized_keys
        if identity.role is AgentRole.PREFILL and self.agent.access.has_lost(Role.PREFILL):
            yield Fault(
                f"our own key is not among the trusted keys of {file} as prefill: decode agents "
                "that share the file refuse us",
                "Trust it there, or where the file is made: kvbus keys trust FILE "
                f"'{identity.server_key}' --name {identity.agent_id} --role prefill",
            )


def _log_faults() -> Iterator[Fault]:
    ago_s = time.monotonic() - LOST_LINES.last_at_s
    if ago_s < OLD_S:
        yield Fault(
            f"{LOST_LINES.number} lines of the log could not be written, last {_age(ago_s)} ago",
            "Check where the stderr of the agent goes: a full disk, or a reader that is stopped or "
            "too slow.",
        )


def current_faults(live: Live, *, wall_s: float, key_options: Mapping[str, str]) -> Iterator[Fault]:
    """Return faults of peers and memory, then those of the last minutes.

    ``wall_s`` is since 1970; ``key_options`` are command-line options by endpoint.
    """
    metrics, silent = live.metrics, live.status.silent_peers
    for endpoint, silent_s in silent.items():
        options = key_options.get(endpoint, "")
        option = (
            f"--only peer --peer {quote(endpoint)}{options}"
            if options
            else f"--peer {quote(endpoint)}"
        )
        yield Fault(
            f"the agent at {endpoint} has not answered for {silent_s:.0f} s",
            f"See that it runs and is not stopped, then run here: kvbus doctor {option}",
        )
    if blocks := metrics.get("kvbus_quarantined_blocks"):
        yield Fault(
            f"{blocks:.0f} blocks are withheld, as a transfer can still write into them",
            "An agent is stopped or cut off: resume it, or kill it. Otherwise they are released "
            "after quarantine_timeout_s.",
        )
    ago_s = wall_s - metrics.get("kvbus_data_end_timestamp_seconds", 0.0)
    if ago_s < OLD_S:
        times = metrics.get("kvbus_data_restarts", 1.0)
        reasons = [one.last_end for one in live.status.processes if one.last_end]
        yield Fault(
            f"the data process has ended, last {_age(ago_s)} ago ({times:.0f} times since the "
            f"start): {', '.join(reasons) or 'the log has the reason'}",
            "Requests continued. If it ends repeatedly, the agent's log and the kernel's have the "
            "reason; check the network of data_interfaces, and memory.",
        )
    yield from _failures([spans[0] for spans in live.recent if spans], live.now_s)


def _failures(handoffs: Sequence[Span], now_s: float) -> Iterator[Fault]:
    by_code: dict[str, list[tuple[float, str]]] = {}
    for one in handoffs:
        if one.error:
            ended_at = one.start_s if one.end_s is None else one.end_s
            by_code.setdefault(one.error.partition(":")[0], []).append((ended_at, one.error))
    for code, failed in sorted(by_code.items(), key=lambda item: -len(item[1])):
        ended_at, error = max(failed)
        ago_s = now_s - ended_at
        if code not in USER_CANCELLED and ago_s < OLD_S:
            yield Fault(
                f"{len(failed)} of the last {len(handoffs)} handoffs failed, "
                f"last {_age(ago_s)} ago, with {error[:MAX_ERROR_CHARS]}",
                ADVICE.get(code, OTHERWISE),
            )


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


def _samples(families: Iterable[Metric]) -> Iterator[tuple[str, float]]:
    for one in (sample for family in families for sample in family.samples):
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(one.labels.items()))
        yield f"{one.name}{{{labels}}}" if labels else one.name, one.value
