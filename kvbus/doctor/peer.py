"""Says whether this machine reaches an agent elsewhere: its peer socket, its packets, its data.

Refuses to say anything to the data plane: a port of it is connected to, and let go.
"""

import socket
from collections.abc import Iterator
from typing import NamedTuple

import anyio

from kvbus.bus import ClientCurve, ask_agent
from kvbus.bus.sockets import host_of
from kvbus.doctor.finding import ERROR, OK, Finding
from kvbus.doctor.names import address_of
from kvbus.errors import KVBusError, RequestTimeout
from kvbus.protocol.peer import AgentStatus, Status

CONNECT_S, ANSWER_S = 3.0, 5.0
LARGE_CHARS = 4096
"""As much as a field of a request may have: with two of them more than a packet of most networks
holds, be they Ethernet or jumbo frames.
"""
LEADS_TO = "Fetches from this agent fail here with "


class PeerToCheck(NamedTuple):
    """An agent elsewhere, and the keys that it is asked with."""

    endpoint: str
    curve: ClientCurve | None = None


def check_peer(peer: PeerToCheck) -> Iterator[Finding]:
    """Its socket; then whether what is large comes there; then the ports that KV is read by."""
    host, port = host_of(peer.endpoint), peer.endpoint.rpartition(":")[2]
    if problem := connect_problem(host, int(port)):
        yield _finding(peer, "socket", problem, f"{LEADS_TO}peer_unreachable.", REACH)
        return
    try:
        status = _ask(peer, Status())
    except KVBusError as error:
        yield _finding(peer, "socket", error.message, f"{LEADS_TO}{error.code}.", LOOK_THERE)
        return
    yield _finding(peer, "socket", "", found=f"the {status.role} agent '{status.agent_id}' answers")
    yield _packets(peer)
    yield _data(peer, status)


REACH = (
    "Let the agent advertise an address that this machine reaches (advertise_host), start it, and "
    "open its ports on the way."
)
LOOK_THERE = "See that the agent runs, is not stopped, and trusts the key that you ask with."


def _packets(peer: PeerToCheck) -> Finding:
    """A request of several packets is answered, where a small one was."""
    try:
        _ask(peer, Status(fetch_id=LARGE_CHARS * "x", offer_id=LARGE_CHARS * "x"))
    except RequestTimeout:
        return _finding(
            peer,
            "packets",
            f"small requests are answered, one of {2 * LARGE_CHARS:,} bytes is not: large packets "
            "are lost on the way there",
            f"{LEADS_TO}peer_unreachable or timeout.",
            "Give the interfaces on both sides the MTU of the smallest link between them. Run this "
            "on the other machine, too: it looks at one direction.",
            command=f"ping -M do -s 1472 {host_of(peer.endpoint)}",
        )
    except KVBusError as error:
        return _finding(peer, "packets", error.message, "It answered before.", LOOK_THERE)
    return _finding(peer, "packets", "", found="packets of full size come there")


def _data(peer: PeerToCheck, status: AgentStatus) -> Finding:
    """At least one address at which its NIXL listens takes a connection."""
    problems = {one: connect_problem(*_split(one)) for one in status.data_endpoints}
    reached = [one for one, problem in problems.items() if not problem]
    if not problems:
        found = "it moves KV by no TCP port, so this was not looked at"
        return _finding(peer, "data", "", found=found)
    if reached:
        return _finding(
            peer, "data", "", found=f"its NIXL takes connections at {', '.join(reached)}"
        )
    listed = "; ".join(f"{one}: {problem}" for one, problem in problems.items())
    return _finding(
        peer,
        "data",
        f"no address of its NIXL takes a connection: {listed}",
        f"{LEADS_TO}transfer_failed or timeout while they read.",
        "Let data_interfaces (or UCX_NET_DEVICES) of that agent name a network that this machine "
        "is on, and let its ports through.",
    )


def connect_problem(host: str, port: int) -> str:
    """Why no TCP connection can be made; empty when one was."""
    try:
        socket.create_connection((address_of(host), port), timeout=CONNECT_S).close()
    except KVBusError as error:
        return error.message
    except TimeoutError:
        return f"{host}:{port} does not answer within {CONNECT_S:g} s"
    except (OSError, OverflowError) as error:
        return f"{host}:{port}: {getattr(error, 'strerror', None) or error}"
    return ""


def _ask(peer: PeerToCheck, status: Status) -> AgentStatus:
    async def ask() -> AgentStatus:
        return await ask_agent(peer.endpoint, status, timeout_s=ANSWER_S, curve=peer.curve)

    return anyio.run(ask)


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def _finding(
    peer: PeerToCheck,
    subject: str,
    problem: str,
    why: str = "",
    fix: str = "",
    *,
    found: str = "",
    command: str = "",
) -> Finding:
    return Finding(
        f"peer.{subject}",
        ERROR if problem else OK,
        problem or found,
        {"endpoint": peer.endpoint, "error": problem},
        why=why,
        fix=fix,
        command=command,
    )
