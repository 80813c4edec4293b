"""Says whether this machine reaches an agent elsewhere: its peer socket, its packets, its data.

Refuses to say anything to the data plane: a port of it is connected to, and let go.
"""

from collections.abc import Iterator

from kvbus.agent.identity import sharing
from kvbus.doctor.asking import (
    LEADS_TO,
    LOOK_THERE,
    PeerToCheck,
    connect_problem,
    finding,
    fix_here,
    status_or_error,
)
from kvbus.doctor.clock import clock_here
from kvbus.doctor.finding import Finding
from kvbus.doctor.near import near_findings
from kvbus.doctor.packets import check_packets, check_silence
from kvbus.doctor.pair import Side, check_pair
from kvbus.errors import ErrorCode, KVBusError, RequestTimeout
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.status import AgentStatus

REACH = (
    "Let the agent advertise an address that this machine reaches (advertise_host), start it, and "
    "open its ports on the way."
)


def check_peer(peer: PeerToCheck, reader: PeerToCheck | None = None) -> Iterator[Finding]:
    """Its socket, packets both ways, the ports that KV is read by, its clock; and how KV comes.

    With a ``reader``, the agent of this side, the last two are between the two agents.
    """
    status = status_or_error(peer)
    if isinstance(status, KVBusError):
        fix, command = fix_here(status.message)
        fix = fix or (REACH if status.code is ErrorCode.PEER_UNREACHABLE else LOOK_THERE)
        why = f"{LEADS_TO}{status.code}."
        yield finding(peer, "socket", status.message, why, fix, command=command)
        if isinstance(status, RequestTimeout):
            yield from check_silence(peer)
        return
    yield finding(peer, "socket", found=f"the {status.role} agent '{status.agent_id}' answers")
    yield check_packets(peer)
    yield _data(peer, status)
    if reader is not None:
        yield from check_pair(Side(peer, status), reader)
        return
    yield clock_here(peer)
    if status.role is AgentRole.PREFILL and status.sharing is not None:
        yield from near_findings(peer.endpoint, status.sharing, sharing())


def _data(peer: PeerToCheck, status: AgentStatus) -> Finding:
    """At least one address at which its NIXL listens takes a connection."""
    problems = {one: connect_problem(*_split(one)) for one in status.data_endpoints}
    reached = [one for one, problem in problems.items() if not problem]
    if not problems:
        found = "it listens at no TCP port for KV now, so this was not looked at"
        if status.sharing is None:
            found = "where its NIXL listens is told with a key only, so this was not looked at"
        return finding(peer, "data", found=found)
    if reached:
        return finding(peer, "data", found=f"its NIXL takes connections at {', '.join(reached)}")
    listed = "; ".join(f"{one}: {problem}" for one, problem in problems.items())
    return finding(
        peer,
        "data",
        f"no address of its NIXL takes a connection: {listed}",
        f"{LEADS_TO}transfer_failed or timeout while they read.",
        "Let data_interfaces (or UCX_NET_DEVICES) of that agent name a network that this machine "
        "is on, and let its ports through.",
    )


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
