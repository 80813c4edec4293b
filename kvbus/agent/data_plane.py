"""Control of the UCX TCP ports: restrict them to the configured interfaces, and verify it.

A peer that reaches such a port can access any memory of the data process, registered or not.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import psutil
import structlog

from kvbus.agent.config import AgentConfig, bind_host
from kvbus.agent.loop import failure, in_thread
from kvbus.data import messages as wire
from kvbus.data.client import DataProcess
from kvbus.errors import ConfigError, KVBusError, TransferFailed, docs_url

UCX_INTERFACES = "UCX_NET_DEVICES"

UCX_PORTS = "UCX_TCP_PORT_RANGE"

LIBFABRIC_INTERFACE = "FI_TCP_IFACE"

log = structlog.get_logger()

_RDMA_DEVICES = Path("/sys/class/infiniband")
CHECK_AGAIN_S = 10.0
HUNG_AFTER_S = 300.0
BLOCKED_AFTER_S = 20.0
"""The same with other backends than UCX: LIBFABRIC waits for ever for a peer that has ended."""
MAX_OPENS = 3
"""Data processes that may end before the start fails."""
_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(slots=True)
class DataPlane:
    interfaces: tuple[str, ...]
    data: DataProcess
    endpoints: tuple[str, ...] = ()
    """As of the last `check`."""
    outside: str = ""
    _turn: anyio.Lock = field(default_factory=anyio.Lock)
    _began_at: float = 0.0
    _requested_at: float | None = None

    async def open(self) -> None:
        """Open NIXL in a data process; raise `TransferFailed`."""
        await self.data.until_running()
        if self.data.is_open and self.data.nixl_error is None:
            return
        try:
            await self._retried(self.data.open_nixl)
        except TransferFailed as error:
            down = without_link(self.interfaces)
            why = "set UCX_LOG_LEVEL=info to see why"
            if down:
                why = f"without a link: {', '.join(down)}"
            closed = TransferFailed(
                f"{self._what} does not start on data_interfaces = {list(self.interfaces)}: "
                f"{error.message}; {why}",
                interfaces=",".join(self.interfaces),
            )
            log.error("data_plane.closed", reason=closed.message)
            raise closed from error
        await self.end_if_exposed()
        log.info("data_plane.opened", data=list(self.endpoints))

    async def check_backends(self) -> None:
        """Load the plugins of the backends; raise `ConfigError`. No port opens."""
        await self._retried(lambda: self.data.call(wire.CheckBackends()))

    async def _retried(self, request: Callable[[], Awaitable[object]]) -> None:
        for tries_left in reversed(range(MAX_OPENS)):
            await self.data.until_running()
            boot = self.data.boot
            try:
                await request()
            except TransferFailed:
                if self.data.boot == boot or not tries_left:
                    raise
            else:
                return

    async def watch(self) -> None:
        limit_s = HUNG_AFTER_S if self.data.backends == (wire.UCX,) else BLOCKED_AFTER_S
        while True:
            await anyio.sleep(CHECK_AGAIN_S)
            _report_descriptors()
            with anyio.move_on_after(limit_s) as within:
                await self._try_to_check()
            if within.cancelled_caught:
                self.data.kill(f"it had not answered for {limit_s:.0f} s")

    @property
    def _what(self) -> str:
        return self.data.backends[0] if len(self.data.backends) == 1 else "NIXL"

    @property
    def silent_s(self) -> float:
        """0 without an unanswered request."""
        return 0.0 if self._requested_at is None else time.monotonic() - self._requested_at

    async def _try_to_check(self) -> bool:
        try:
            await self.check()
        except TransferFailed:  # the data process has ended, which is logged elsewhere
            return False
        except (KVBusError, OSError) as error:
            log.error("data_plane.unseen", reason=failure(error).message)
            return True
        return False

    async def check(self) -> None:
        """Refresh `endpoints`; waiting callers share one request. Raises `TransferFailed`."""
        requested_at = time.monotonic()
        async with self._turn:
            if self._began_at < requested_at:
                self._began_at = self._requested_at = time.monotonic()
                try:
                    reply = await self.data.call(wire.ListListening())
                finally:
                    self._requested_at = None
                sockets = reply.result.sockets if isinstance(reply.result, wire.Listening) else ()
                self.endpoints = tuple(f"{host}:{port}" for host, port in sockets)
                self.outside = await in_thread(partial(_outside, sockets, self.interfaces))

    def is_down(self) -> bool:
        return len(without_link(self.interfaces)) == len(self.interfaces)

    async def end_if_exposed(self) -> None:
        with suppress(TransferFailed):
            await self.check()
        self._end_if_outside()

    async def check_until_done(self) -> None:
        while await self._try_to_check():  # noqa: ASYNC110 - an event would serve this loop only
            await anyio.sleep(CHECK_AGAIN_S)
        self._end_if_outside()

    def _end_if_outside(self) -> None:
        if self.outside:
            reason = (
                f"{self._what} listens at {self.outside}, which data_interfaces = "
                f"{list(self.interfaces)} does not allow; check the UCX_ and FI_ settings of the "
                "environment"
            )
            log.critical("data_plane.exposed", reason=reason)
            os._exit(1)


def _report_descriptors() -> None:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        log.error("descriptors.exhausted", reason=error.strerror)


def _outside(sockets: Iterable[tuple[str, int]], interfaces: Iterable[str]) -> str:
    allowed = _addresses(interfaces)
    return ", ".join(f"{host}:{port}" for host, port in sockets if host not in allowed)


def is_on_loopback(config: AgentConfig) -> bool:
    binds = (config.peer_bind, config.events_bind)
    return not config.data_interfaces and all(is_loopback(bind_host(bind)) for bind in binds)


def is_one_machine(config: AgentConfig) -> bool:
    """Return whether all agents that reach this one are on its machine, and can map memory."""
    return config.mapped and is_on_loopback(config)


def choose_interfaces(config: AgentConfig) -> tuple[str, ...]:
    """Raise `ConfigError` if other machines reach the agent and no interface is named."""
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
        f"ports ({docs_url('security')})",
        key="data_interfaces",
    )


def without_link(interfaces: Iterable[str]) -> tuple[str, ...]:
    try:
        stats = psutil.net_if_stats()
    except OSError:  # no descriptor is left
        return ()
    return tuple(name for name in interfaces if name in stats and not stats[name].isup)


def nixl_environment(interfaces: Sequence[str], ports: str = "") -> dict[str, str]:
    """Return the settings that restrict UCX and libfabric to ``interfaces``."""
    settings = {UCX_INTERFACES: ",".join(interfaces)}
    if ports:
        settings[UCX_PORTS] = ports
    if interfaces and not has_rdma(interfaces) and LIBFABRIC_INTERFACE not in os.environ:
        settings[LIBFABRIC_INTERFACE] = interfaces[0]  # it opens only one
    return settings


def has_rdma(interfaces: Iterable[str]) -> bool:
    return not {name.partition(":")[0] for name in interfaces}.isdisjoint(_rdma_devices())


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("localhost", *_loopback_interfaces())  # ZeroMQ binds to interfaces too


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
    of_all = psutil.net_if_addrs()
    return {
        one.address.partition("%")[0]
        for name in interfaces
        for one in of_all.get(name, ())
        if one.family in _IP_FAMILIES
    }
