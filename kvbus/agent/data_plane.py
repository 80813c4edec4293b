"""Keeps the TCP ports of UCX to the interfaces that the config names, and looks whether they are.

UCX over TCP never asks whether an address was registered: whoever connects to one of its ports
reads and writes any memory of this process. Left alone, UCX listens on every interface.
"""

import asyncio
import errno
import ipaddress
import os
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import psutil
import structlog

from kvbus.agent.config import AgentConfig, bind_host
from kvbus.agent.loop import failure, in_thread
from kvbus.errors import ConfigError, TransferFailed
from kvbus.transport import Transport

UCX_INTERFACES = "UCX_NET_DEVICES"
"""What UCX reads, as it starts, from the environment: device names with commas between them."""

UCX_PORTS = "UCX_TCP_PORT_RANGE"

log = structlog.get_logger()

_RDMA_DEVICES = Path("/sys/class/infiniband")
LOOK_AGAIN_S = 10.0
_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(slots=True)
class DataPlane:
    """The interfaces that UCX may use, and the ports of the agent that are not UCX's."""

    interfaces: tuple[str, ...]
    transport: Transport
    other_ports: Callable[[], Collection[int]] = frozenset
    endpoints: tuple[str, ...] = ()
    """HOST:PORT of each TCP socket at which UCX listens, as of the last look."""
    outside: str = ""
    """Those of them that are outside of the interfaces."""
    _turn: anyio.Lock = field(default_factory=anyio.Lock)
    _began_at: float = 0.0

    async def open(self) -> None:
        """Have UCX listen, if it does not; raises `TransferFailed` that says what it lacks."""
        if self.transport.is_open:
            return
        try:
            await asyncio.wrap_future(self.transport.open())
        except TransferFailed as error:
            down = without_link(self.interfaces)
            why = "set UCX_LOG_LEVEL=info to see why"
            if down:
                why = f"without a link: {', '.join(down)}"
            closed = TransferFailed(
                f"UCX does not start on data_interfaces = {list(self.interfaces)}: "
                f"{error.message}; {why}",
                interfaces=",".join(self.interfaces),
            )
            log.error("data_plane.closed", reason=closed.message)
            raise closed from error
        await self.end_if_exposed()
        log.info("data_plane.opened", data=list(self.endpoints))

    async def watch(self) -> None:
        """Look again and again: UCX may open more."""
        while True:
            await anyio.sleep(LOOK_AGAIN_S)
            await self._try_to_look()

    async def _try_to_look(self) -> bool:
        """Whether it could look; what prevents that is logged, and ends no agent."""
        try:
            await self.look()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                log.error("descriptors.exhausted", reason=error.strerror)
            else:
                failure(error)
            return False
        return True

    async def look(self) -> None:
        """Look where UCX listens, in a thread; one look serves all who waited for it to begin."""
        asked_at = time.monotonic()
        async with self._turn:
            if self._began_at < asked_at:
                self._began_at = time.monotonic()
                ours = self.other_ports()
                find = partial(_find, ours, self.interfaces)
                self.endpoints, self.outside = await in_thread(find)

    def is_down(self) -> bool:
        """Whether none of the interfaces has a link now; one that cannot be asked counts as linked.

        RDMA devices are such.
        """
        return len(without_link(self.interfaces)) == len(self.interfaces)

    async def end_if_exposed(self) -> None:
        """End the process if UCX listens outside of the interfaces: it must serve no request."""
        await self.look()
        self._end_if_outside()

    async def end_once_exposed(self) -> None:
        """As `end_if_exposed`, in a task of its own: look again until it is possible."""
        is_seen = await self._try_to_look()
        while not is_seen:
            await anyio.sleep(LOOK_AGAIN_S)
            is_seen = await self._try_to_look()
        self._end_if_outside()

    def _end_if_outside(self) -> None:
        if self.outside:
            reason = (
                f"UCX listens at {self.outside}, which data_interfaces = {list(self.interfaces)} "
                "does not allow; look at the UCX_ settings of the environment"
            )
            log.critical("data_plane.exposed", reason=reason)
            os._exit(1)


def _find(ours: Collection[int], interfaces: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """Where this process listens but for our ports, and which of it is outside of interfaces."""
    ends = sorted(end for end in _listening() if end[1] not in ours)
    allowed = _addresses(interfaces)
    outside = [f"{host}:{port}" for host, port in ends if host not in allowed]
    return tuple(f"{host}:{port}" for host, port in ends), ", ".join(outside)


def is_on_loopback(config: AgentConfig) -> bool:
    """Whether this machine alone reaches the agent, and UCX is to use loopback."""
    binds = (config.peer_bind, config.events_bind)
    return not config.data_interfaces and all(is_loopback(bind_host(bind)) for bind in binds)


def is_one_machine(config: AgentConfig) -> bool:
    """Whether all agents that reach this one are of its machine, and can map memory.

    UCX is then opened when it is needed for the first time, which may be never.
    """
    return config.mapped and is_on_loopback(config)


def choose_interfaces(config: AgentConfig) -> tuple[str, ...]:
    """What UCX may use: the config's choice, the environment's, or loopback if the binds are.

    Raises `ConfigError` when other machines reach the agent and nobody has named the interfaces.
    """
    if config.data_interfaces:
        _require_known(config.data_interfaces, "key 'data_interfaces'")
        return config.data_interfaces
    if named := _from_environment():
        _require_known(named, UCX_INTERFACES)
        return named
    if is_on_loopback(config):
        return _loopback_interfaces()
    raise ConfigError(
        "key 'data_interfaces': needed, because peer_bind or events_bind is not loopback: name the "
        "network interfaces or RDMA devices that KV passes over, and let only agents reach their "
        "ports (docs/security.md)",
        key="data_interfaces",
    )


def without_link(interfaces: Iterable[str]) -> tuple[str, ...]:
    """Those without a link now; one that cannot be asked, as an RDMA device, counts as linked."""
    try:
        stats = psutil.net_if_stats()
    except OSError:  # no descriptor is left
        return ()
    return tuple(name for name in interfaces if name in stats and not stats[name].isup)


def restrict_ucx(interfaces: Iterable[str], ports: str = "") -> None:
    """Let UCX use these interfaces and ports only; call it before the first NIXL agent is made."""
    os.environ[UCX_INTERFACES] = ",".join(interfaces)
    if ports:
        os.environ[UCX_PORTS] = ports


def has_rdma(interfaces: Iterable[str]) -> bool:
    """Whether one of them is an RDMA device, which writes without this process."""
    return not {name.partition(":")[0] for name in interfaces}.isdisjoint(_rdma_devices())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a socket that is bound to ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("localhost", *_loopback_interfaces())  # ZeroMQ binds to interfaces too


def _listening() -> Iterator[tuple[str, int]]:
    """Host and port of each TCP socket at which this process listens.

    Its descriptors are asked: what Linux lists has the sockets of the whole machine, maybe 100,000.
    """
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            duplicate = os.dup(number)
            try:
                one = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                raise
            with one:
                is_tcp = one.family in _IP_FAMILIES and one.type == socket.SOCK_STREAM
                if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host, port, *_ = one.getsockname()
                    yield host.partition("%")[0], port
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSOCK):  # closed meanwhile, or reused
                raise


def _from_environment() -> tuple[str, ...]:
    named = os.environ.get(UCX_INTERFACES, "")
    return () if named == "all" else tuple(name for name in named.split(",") if name)


def _require_known(names: Collection[str], source: str) -> None:
    known = {*psutil.net_if_addrs(), *_rdma_devices()}
    unknown = [name for name in names if name.partition(":")[0] not in known]
    if unknown:
        raise ConfigError(
            f"{source}: this machine has no {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}",
            key="data_interfaces",
        )


def _rdma_devices() -> list[str]:
    return [one.name for one in _RDMA_DEVICES.iterdir()] if _RDMA_DEVICES.is_dir() else []


def _loopback_interfaces() -> tuple[str, ...]:
    return tuple(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.family in _IP_FAMILIES and is_loopback(one.address) for one in addresses)
    )


def _addresses(interfaces: Iterable[str]) -> set[str]:
    """Every IP address of these network interfaces; an RDMA device has none."""
    of_all = psutil.net_if_addrs()
    return {
        one.address.partition("%")[0]
        for name in interfaces
        for one in of_all.get(name, ())
        if one.family in _IP_FAMILIES
    }
