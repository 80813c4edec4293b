"""Tries what agents want: binds their ports, makes their folder, and gives all back.

Refuses to listen: a port is bound and let go, so nobody can connect to a probe.
"""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio

from kvbus.agent.process.config import AgentConfig, convert_config, load_shared_config
from kvbus.agent.process.defaults import DECODE_DEFAULTS, PREFILL_DEFAULTS
from kvbus.bus import ask_agent
from kvbus.doctor.check.agents import AgentFacts, Bind
from kvbus.errors import ConfigError, KVBusError
from kvbus.memory.attach.path import check_path_length, prepare_directory
from kvbus.protocol.peer import Status

ASK_S = 2.0
_SIOCGIFADDR = 0x8915
_ADDRESS_BYTES = slice(20, 24)  # of a struct ifreq that has an IPv4 address

AgentSource = tuple[str, AgentConfig]


def wanted_agents(paths: list[Path]) -> list[AgentSource]:
    """The agents of these files, or of both services' defaults; raises `ConfigError`."""
    if paths:
        return [(str(path), load_shared_config(path)) for path in paths]
    defaults = {"kvbus-prefill": PREFILL_DEFAULTS, "kvbus-decode": DECODE_DEFAULTS}
    return [
        (f"the defaults of {name}", convert_config(AgentConfig, dict(keys), source=name))
        for name, keys in defaults.items()
    ]


def agent_facts(source: str, config: AgentConfig) -> AgentFacts:
    """What came of trying each of them."""
    keys = [key for key in ("peer_bind", "events_bind", "metrics_bind") if getattr(config, key)]
    return AgentFacts(
        source=source,
        agent_id=config.agent_id,
        binds=tuple(_bind(key, getattr(config, key)) for key in keys),
        folder=str(config.runtime_path),
        folder_error=_folder_error(config),
        staging_bytes=config.staging_bytes,
    )


def _bind(key: str, address: str) -> Bind:
    error = _bind_error(address)
    is_taken = key == "peer_bind" and error == os.strerror(errno.EADDRINUSE)
    held_by = anyio.run(_agent_at, address) if is_taken else ""
    return Bind(key=key, address=address, error=error, held_by=held_by)


def _bind_error(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    by_bus = address.startswith("tcp://")  # ZeroMQ: of IPv4, and takes names of interfaces
    try:
        host = (_interface_address(host) if by_bus else "") or host or "127.0.0.1"
        found = socket.getaddrinfo(
            None if host == "*" else host.strip("[]"),
            int(port),
            family=socket.AF_INET if by_bus else socket.AF_UNSPEC,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        family, *_, socket_address = found[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(socket_address)
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", "") or str(error)
    return ""


def _interface_address(name: str) -> str:
    """The IPv4 address of an interface; empty when there is none of this name."""
    if name not in {found for _, found in socket.if_nameindex()}:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = name.encode().ljust(40, b"\0")
        return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[_ADDRESS_BYTES])


async def _agent_at(address: str) -> str:
    """The id of the agent that answers there, empty when none does."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    here = "127.0.0.1" if host in ("*", "0.0.0.0") else host  # noqa: S104 - compared
    try:
        status = await ask_agent(f"tcp://{here}:{port}", Status(), timeout_s=ASK_S)
    except KVBusError:
        return ""
    return status.agent_id


def _folder_error(config: AgentConfig) -> str:
    try:
        check_path_length(config.attach_path)
        with _leaving_nothing(config.runtime_path):
            prepare_directory(config.runtime_path)
            if not os.access(config.runtime_path, os.W_OK | os.X_OK):
                return f"the runtime directory {config.runtime_path} cannot be written to"
    except ConfigError as error:
        return error.message
    return ""


@contextlib.contextmanager
def _leaving_nothing(folder: Path) -> Iterator[None]:
    """Remove, at the end, the folder and those above it, as far as they were not there before."""
    new = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        yield
    finally:
        for path in new:  # the innermost first
            with contextlib.suppress(OSError):
                path.rmdir()
