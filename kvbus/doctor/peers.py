"""Checks of a remote agent, and of two agents as a pair, by their status: no handoff is made."""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import anyio
from msgspec import structs

from kvbus.agent.identity import machine_id, mount_namespace, sharing
from kvbus.bus import ClientCurve, agent_client, call_agent
from kvbus.bus.connection import resolve
from kvbus.bus.sockets import host_of
from kvbus.clocks import ClockOffset, Exchange
from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding, Severity
from kvbus.errors import ErrorCode, KVBusError, RemoteError, RequestTimeout, docs_url
from kvbus.output import waiting_for
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.message import MAX_TEXT_CHARS, R, Request
from kvbus.protocol.ticket import CLOCK_TOLERANCE_S
from kvbus.protocol.tools import AgentStatus, PeerView, Sharing, Status, Trace
from kvbus.text import time_text

CONNECT_S, ANSWER_S = 3.0, 5.0
PADDING = 2 * MAX_TEXT_CHARS * "x"
"""Exceeds a packet of most networks, including jumbo frames."""
NUM_EXCHANGES = 8
APART_S = 1.0
"""Offset from which log lines of one handoff appear out of order."""
LEADS_TO = "Fetches from this agent fail here with "
NOTHING = AgentStatus("", AgentRole.DECODE, {}, draining=False, counts={})
SEE_AGENT = "See that the agent runs, is not stopped, and trusts your key."


@dataclass(frozen=True, slots=True)
class QueriedAgent:
    endpoint: str
    curve: ClientCurve | None = None
    reported: AgentStatus = NOTHING

    def request(self, message: Request[R]) -> R:
        async def run() -> R:
            return await call_agent(self.endpoint, message, timeout_s=ANSWER_S, curve=self.curve)

        with waiting_for(f"{self.endpoint} to answer"):
            return anyio.run(run)

    def status(self) -> AgentStatus:
        """Return the status; raises `KVBusError`, also if no TCP connection is accepted."""
        problem = connect_problem(host_of(self.endpoint), int(self.endpoint.rpartition(":")[2]))
        if problem:
            raise RemoteError(problem, code=ErrorCode.PEER_UNREACHABLE)
        return self.request(Status(faults=True))

    def about(self, other: "QueriedAgent") -> "QueriedAgent":
        key = other.curve.server_key if other.curve else ""
        endpoints = dict.fromkeys((other.reported.peer_endpoint or other.endpoint, other.endpoint))
        answers = [self.request(Status(peer=at, key=key)) for at in endpoints]
        return replace(self, reported=max(answers, key=_knows))

    @property
    def view(self) -> PeerView:
        return self.reported.view or PeerView()

    @property
    def name(self) -> str:
        return f"the {self.reported.role} agent '{self.reported.agent_id}'"


def _knows(status: AgentStatus) -> bool:
    view = status.view
    return view is not None and bool(view.listed or view.num_routes or view.problem)


def address_of(host: str) -> str:
    """Resolve a host within seconds, as a name server may not answer; raises `RemoteError`."""
    return anyio.run(resolve, host).strip("[]")


def connect_problem(host: str, port: int) -> str:
    try:
        socket.create_connection((address_of(host), port), timeout=CONNECT_S).close()
    except KVBusError as error:
        return error.message
    except TimeoutError:
        return f"{host}:{port} does not answer within {CONNECT_S:g} s"
    except (OSError, OverflowError) as error:
        return f"{host}:{port}: {getattr(error, 'strerror', None) or error}"
    return ""


def check_peer(peer: QueriedAgent, reader: QueriedAgent | None = None) -> Iterator[Finding]:
    """``reader`` is the decode agent that reads from it."""
    try:
        peer = replace(peer, reported=peer.status())
    except KVBusError as error:
        fix, command = SEE_AGENT, ""
        if error.code is ErrorCode.PEER_UNREACHABLE:
            fix, command = (
                "See that an interface with a route there is up here, and that the other machine "
                "is. Let the agent advertise an address that this machine reaches "
                "(advertise_host), start it, and open its ports on the way.",
                "ip -brief link; ip route",
            )
        why = f"{LEADS_TO}{error.code}."
        yield _finding(peer, "socket", ERROR, error.message, why, fix, command)
        if isinstance(error, RequestTimeout) and _answers_short(peer):
            yield _packets_lost(peer)
        return
    yield _finding(peer, "socket", OK, f"{peer.name} answers")
    yield faults_of("peer.faults", peer.reported)
    yield _packets(peer)
    yield _data(peer)
    yield _clock(peer)
    if reader is not None:
        yield from _check_pair(peer, reader)
    elif peer.reported.role is AgentRole.PREFILL and peer.reported.sharing is not None:
        decode_here = structs.replace(NOTHING, sharing=sharing())
        yield how_kv_comes("peer.one_machine", peer.reported, decode_here)


def _finding(
    peer: QueriedAgent,
    subject: str,
    severity: Severity,
    found: str,
    *reasons: str,
) -> Finding:
    values = {"endpoint": peer.endpoint, "error": found if severity in (WARNING, ERROR) else ""}
    return Finding(f"peer.{subject}", severity, found, values, *reasons)


def _answers_short(peer: QueriedAgent) -> bool:
    try:
        peer.request(Trace())
    except KVBusError:
        return False
    return True


def _packets(peer: QueriedAgent) -> Finding:
    """The agent echoes a request of full size."""
    try:
        peer.request(Status(echo=PADDING))
    except RequestTimeout:
        return _packets_lost(peer)
    except KVBusError as error:
        return _finding(peer, "packets", ERROR, error.message, "It answered before.", SEE_AGENT)
    return _finding(peer, "packets", OK, "packets of full size arrive in both directions")


def _packets_lost(peer: QueriedAgent) -> Finding:
    return _finding(
        peer,
        "packets",
        ERROR,
        "small requests are answered, large ones are not: large packets are lost on the way",
        f"{LEADS_TO}peer_unreachable or timeout.",
        "Give the interfaces on both sides the MTU of the smallest link between them.",
        f"ping -M do -s 1472 {quote(host_of(peer.endpoint))}",
    )


def faults_of(name: str, status: AgentStatus) -> Finding:
    what = [fault.what for fault in status.faults]
    found = "; ".join(what) or "it reports no fault"
    if status.sharing is None:
        found = "the agent reports faults only to a trusted key, or to its own user"
    return Finding(
        name,
        WARNING if what else OK,
        found,
        {"agent": status.agent_id, "faults": what},
        why="The agent reports these faults itself.",
        fix=" ".join(dict.fromkeys(fault.do for fault in status.faults)),
    )


def _data(peer: QueriedAgent) -> Finding:
    ends = [(one, *one.rsplit(":", 1)) for one in peer.reported.data_endpoints]
    problems = {one: connect_problem(host, int(port)) for one, host, port in ends}
    if not problems:
        found = "it listens at no TCP port for KV now, so this was not checked"
        if peer.reported.sharing is None:
            found = "not checked: it reports where its NIXL listens only to a trusted key"
        return _finding(peer, "data", OK, found)
    if reached := [one for one, problem in problems.items() if not problem]:
        return _finding(peer, "data", OK, f"its NIXL takes connections at {', '.join(reached)}")
    listed = "; ".join(f"{one}: {problem}" for one, problem in problems.items())
    return _finding(
        peer,
        "data",
        ERROR,
        f"no address of its NIXL takes a connection: {listed}",
        f"{LEADS_TO}transfer_failed or timeout while they read.",
        "Let data_interfaces (or UCX_NET_DEVICES) of that agent name a network that this machine "
        "is on, and let its ports through.",
    )


def _check_pair(peer: QueriedAgent, reader: QueriedAgent) -> Iterator[Finding]:
    try:
        reader = replace(reader, reported=reader.status())
    except KVBusError as error:
        why, fix = "The two are not compared.", f"See that it is reached from here. {SEE_AGENT}"
        yield _finding(reader, "from", ERROR, error.message, why, fix)
        return
    its = reader.reported.sharing
    is_here = its is None or its.machine == machine_id()
    yield _finding(
        reader,
        "from",
        OK if is_here else NOTE,
        f"{reader.name} answers" + ("" if is_here else ", from another machine than this"),
        "Sockets, packets and ports were checked from here: run this on that machine.",
    )
    yield faults_of("peer.reader_faults", reader.reported)
    is_right = (peer.reported.role, reader.reported.role) == (AgentRole.PREFILL, AgentRole.DECODE)
    yield _finding(
        peer,
        "roles",
        OK if is_right else ERROR,
        f"--peer is {peer.name}, --from {reader.name}",
        "KV goes from a prefill agent to a decode agent.",
        "Name the prefill agent with --peer, and the decode agent that reads from it with --from.",
    )
    if not is_right:
        return
    peer, reader = peer.about(reader), reader.about(peer)
    yield _keys(peer, reader)
    yield _handshake(peer, reader)
    yield how_kv_comes("peer.one_machine", peer.reported, reader.reported)


def _keys(peer: QueriedAgent, reader: QueriedAgent) -> Finding:
    has_key = [one for one in (peer, reader) if one.view.server_key]
    if not has_key:
        return _finding(peer, "keys", OK, "both agents are without keys")
    why = "Agents with keys accept only keys that they trust, in the role of the other agent."
    if len(has_key) == 1:
        lacks = reader if has_key == [peer] else peer
        found = f"{has_key[0].name} has a key, {lacks.name} has none"
        fix = f"Give both key_file and authorized_keys ({docs_url('security')}), or neither."
        return _finding(peer, "keys", ERROR, found, why, fix)
    problems, commands = [], []
    for one, other in ((reader, peer), (peer, reader)):
        role, key = other.reported.role, other.view.server_key
        if role not in one.view.roles:
            trusted = " and ".join(one.view.roles) or "nothing"
            problems.append(
                f"{one.name} trusts the key {key} of {other.name} as {trusted}, not as {role}"
            )
            named = quote(other.reported.agent_id)
            commands.append(f"kvbus keys trust FILE {quote(key)} --name {named} --role {role}")
    if not problems:
        return _finding(peer, "keys", OK, "each agent trusts the key of the other")
    fix = "Trust it, in the file (authorized_keys) of the agent that does not."
    return _finding(peer, "keys", ERROR, "; ".join(problems), why, fix, "; ".join(commands))


def _handshake(peer: QueriedAgent, reader: QueriedAgent) -> Finding:
    view = reader.view
    severity, why, fix = NOTE, "", ""
    if view.problem:
        severity = WARNING if view.num_routes else ERROR
        found = f"the last handshake of {reader.name} with it failed: {view.problem}"
        why = "Fetches from it fail, or take longer, until a handshake succeeds."
        fix = (
            "Fix the reason; handshake.refused and peer.cold in the decode agent's log have the "
            "details."
        )
    elif view.num_routes:
        listed = "listed and connected, " if view.connected else ""
        severity, found = OK, f"{listed}routes known: {view.num_routes}"
    elif view.listed:
        found = "listed, not connected: no two engines that fit are there yet"
    else:
        found = f"not listed; no engine of {reader.name} has a route to it now"
    return _finding(peer, "handshake", severity, found, why, fix)


def how_kv_comes(name: str, prefill: AgentStatus, decode: AgentStatus) -> Finding:
    theirs, ours = prefill.sharing or Sharing(), decode.sharing or Sharing()
    values: dict[str, object] = {"prefill": prefill.agent_id, "decode": decode.agent_id}
    if not (theirs.machine and ours.machine):
        found = (
            "not checked: agents report where they run only to a trusted key, or to their own user"
        )
        return Finding(name, NOTE, found, values)
    if theirs.machine != ours.machine:
        return Finding(name, OK, "the agents are on two machines: NIXL reads KV", values)
    closed = _why_not_mapped(prefill, theirs, ours)
    is_near = theirs.pid_namespace in ("", ours.pid_namespace)
    way = (
        f"and is read through shared memory: {closed}" if closed else "and its memory can be mapped"
    )
    if closed and not is_near:
        way = f"in another PID namespace, so UCX reads it over TCP: {closed}"
    return Finding(
        name,
        WARNING if closed and not is_near else OK,
        f"it is on the same machine, {way}",
        {**values, "not_mapped": closed, "same_pid_namespace": is_near},
        why="A decode agent copies memory that it maps in one pass. UCX reads the rest, through "
        "shared memory within one PID namespace, and else over TCP, at a fraction of the speed.",
        fix="Mount the prefill agent's runtime_dir into the decode agent's container, at the same "
        f"path, with both agents of one user ({docs_url('kubernetes')}, pods of one node); or give "
        "both one PID namespace.",
    )


def _why_not_mapped(prefill: AgentStatus, theirs: Sharing, ours: Sharing) -> str:
    """Return why the decode agent cannot map the memory; its actual attempts count first."""
    names = [f"{engine} at {prefill.agent_id}" for engine in prefill.engines]
    if attempts := [ours.engines[name] for name in names if name in ours.engines]:
        return next((state for state in attempts if state != "open"), "")
    if closed := theirs.closed or ours.closed:
        return closed
    if theirs.uid != ours.uid:
        return f"it is of uid {theirs.uid}, and the reader of uid {ours.uid}"
    if ours.mount_namespace != mount_namespace():  # another mount namespace is not visible here
        is_one = theirs.mount_namespace == ours.mount_namespace
        return "" if is_one else f"{theirs.path} may not be there for the reader"
    try:
        return "" if Path(theirs.path).is_socket() else f"{theirs.path} is not here"
    except OSError as error:
        return f"{theirs.path}: {error.strerror}"


def _clock(peer: QueriedAgent) -> Finding:
    try:
        clock = anyio.run(_query_clock, peer)
    except KVBusError as error:
        found = f"not checked, as the agent did not report its wall clock: {error.message}"
        return _finding(peer, "clock", NOTE, found)
    is_apart = abs(clock.offset_s) >= APART_S and abs(clock.offset_s) > clock.error_s
    side = "behind" if clock.offset_s > 0 else "ahead of"
    offset = (
        f"{time_text(abs(clock.offset_s))} {side} this machine's, +/-{time_text(clock.error_s)}"
    )
    return Finding(
        "peer.clock",
        WARNING if is_apart else OK,
        f"its wall clock is {offset}",
        {"endpoint": peer.endpoint, "ahead_s": -clock.offset_s, "error_s": clock.error_s},
        why="Lines of logs, and spans of a collector, have the wall clock of their machine: those "
        f"of one handoff do not stand side by side. From {CLOCK_TOLERANCE_S} s on signed tickets "
        "are refused.",
        fix="Let both machines follow the same time server, by chrony or another client of NTP.",
        command="chronyc tracking",
    )


async def _query_clock(peer: QueriedAgent) -> ClockOffset:
    exchanges: list[Exchange] = []
    async with agent_client(peer.endpoint, curve=peer.curve) as client:
        for _ in range(NUM_EXCHANGES):
            sent_s = time.time()
            answer = await client.request(Trace(), timeout_s=ANSWER_S)
            exchanges.append(Exchange(sent_s, answer.wall_s, time.time()))
    return ClockOffset.of(exchanges)
