"""An agent elsewhere: how it is asked, and findings about it."""

import errno
import os
import socket
from typing import NamedTuple

import anyio

from kvbus.bus import ClientCurve, ask_agent
from kvbus.bus.sockets import host_of
from kvbus.doctor.finding import ERROR, OK, Finding
from kvbus.doctor.names import address_of
from kvbus.errors import ErrorCode, KVBusError, RemoteError
from kvbus.protocol.message import R, Request
from kvbus.protocol.status import AgentStatus, Status

CONNECT_S, ANSWER_S = 3.0, 5.0
LEADS_TO = "Fetches from this agent fail here with "
NO_WAY = tuple(map(os.strerror, (errno.ENETUNREACH, errno.EHOSTUNREACH)))
SEE_HERE = (
    "This machine has no route there: see whether an interface of data_interfaces is down here. If "
    "none is, the other machine is down, or its agent's advertise_host is wrong."
)
SHOW_HERE = "ip -brief link; ip route"
LOOK_THERE = "See that the agent runs, is not stopped, and trusts the key that you ask with."


class PeerToCheck(NamedTuple):
    """An agent elsewhere, and the keys that it is asked with."""

    endpoint: str
    curve: ClientCurve | None = None

    @property
    def host(self) -> str:
        """Its host, without brackets."""
        return host_of(self.endpoint)

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.endpoint.rpartition(":")[2])


def ask(peer: PeerToCheck, message: Request[R]) -> R:
    """The answer, by a connection of its own; raises `KVBusError`."""

    async def run() -> R:
        return await ask_agent(peer.endpoint, message, timeout_s=ANSWER_S, curve=peer.curve)

    return anyio.run(run)


def answer_or_error(peer: PeerToCheck, message: Request[R]) -> R | KVBusError:
    """The answer, or why there is none."""
    try:
        return ask(peer, message)
    except KVBusError as error:
        return error


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


def fix_here(problem: str) -> tuple[str, str]:
    """What to do, and a command, where it is this machine that finds no way there; else empty."""
    return (SEE_HERE, SHOW_HERE) if problem.endswith(NO_WAY) else ("", "")


def status_or_error(peer: PeerToCheck) -> AgentStatus | KVBusError:
    """What the agent holds, or why it does not tell: nobody takes a connection there, or more."""
    if problem := connect_problem(peer.host, peer.port):
        return RemoteError(problem, code=ErrorCode.PEER_UNREACHABLE)
    return answer_or_error(peer, Status())


def finding(
    peer: PeerToCheck,
    subject: str,
    problem: str = "",
    why: str = "",
    fix: str = "",
    *,
    found: str = "",
    command: str = "",
) -> Finding:
    """An error if there is a problem; else what was found is as it should be."""
    return Finding(
        f"peer.{subject}",
        ERROR if problem else OK,
        problem or found,
        {"endpoint": peer.endpoint, "error": problem},
        why=why,
        fix=fix,
        command=command,
    )
