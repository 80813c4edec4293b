"""Turns host names into addresses, in threads, so that ZeroMQ gets numbers only.

libzmq resolves a name in its one I/O thread, again at each reconnect: one name server that is dead
holds up all sockets of a process for seconds.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbus.bus.allowed import AllowedPeers
from kvbus.bus.sockets import Socket, connect, host_of, is_numeric
from kvbus.bus.timers import Timers
from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError

ANSWER_WITHIN_S = 5.0
KEEP_S, MAX_KEPT = 30.0, 4096
MAX_LOOKUPS = 32
RETRY_S, MAX_RETRY_S = 1.0, 30.0

OnAddress = Callable[[str | OSError], None]


@dataclass(slots=True)
class NameCache:
    """The addresses of names, for `KEEP_S`, and the lookups under way: one thread a name.

    Used from the threads of many event loops. A lookup cannot be ended, so its thread is a daemon.
    """

    lookup: Callable[[str], str]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: dict[str, tuple[str, float]] = field(default_factory=dict)
    _waiting: dict[str, list[OnAddress]] = field(default_factory=dict)

    def find(self, host: str, on_address: OnAddress) -> None:
        """Call back with the address or why there is none: now, or later from another thread."""
        with self._lock:
            address, kept_until = self._kept.get(host, ("", 0.0))
            if time.monotonic() >= kept_until:
                self._wait(host, on_address)
                return
        on_address(address)

    def _wait(self, host: str, on_address: OnAddress) -> None:
        if host in self._waiting:
            self._waiting[host].append(on_address)
        elif len(self._waiting) >= MAX_LOOKUPS:
            on_address(OSError(f"{MAX_LOOKUPS} other names are being looked up"))
        else:
            self._waiting[host] = [on_address]
            threading.Thread(target=self._look_up, args=(host,), daemon=True).start()

    def _look_up(self, host: str) -> None:
        try:
            found: str | OSError = self.lookup(host)
        except OSError as error:
            found = error
        except UnicodeError:
            found = OSError("it is not a host name")
        with self._lock:
            if isinstance(found, str):
                while len(self._kept) >= MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[host] = found, time.monotonic() + KEEP_S
            waiting = self._waiting.pop(host)
        for on_address in waiting:
            on_address(found)


def look_up(host: str) -> str:
    """The first address of ``host``, as it stands in an endpoint; blocks. Raises `OSError`."""
    return look_up_all(host)[0]


def look_up_all(host: str) -> list[str]:
    """All addresses of ``host``, as they stand in endpoints; blocks. Raises `OSError`."""
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    texts = (
        f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])
        for family, *_, address in found
    )
    return list(dict.fromkeys(texts))


NAMES = NameCache(look_up)
"""Those of this process."""


class NamedConnection:
    """Connects a socket to an endpoint: with a name, as soon as the name is resolved.

    Without one it is connected by `connect`, before anything runs.
    ``on_error`` is told each time that it cannot be: the name server said no, or nothing within
    `ANSWER_WITHIN_S`, or an address that is not ``allowed``. It is tried again, ever more slowly,
    until `close`.
    """

    def __init__(
        self,
        socket: Socket,
        endpoint: str,
        *,
        timers: Timers,
        on_error: Callable[[KVBusError], None],
        names: NameCache = NAMES,
        allowed: AllowedPeers | None = None,
    ) -> None:
        self._socket, self.endpoint, self._allowed = socket, endpoint, allowed
        self._timers, self._on_error, self._names = timers, on_error, names
        self.address = endpoint if is_numeric(endpoint) else ""
        """Where the socket is connected to, in numbers; empty until the name is resolved."""
        self._retry_s = RETRY_S
        self._attempt = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def connect(self) -> None:
        """Connect to an endpoint without a name; raises `LocalError` and closes the socket."""
        if self.address:
            connect(self._socket, self.address, self._allowed)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look the name up, if there is one."""
        if not is_numeric(self.endpoint):
            self._loop = loop
            self._try(0)

    def close(self) -> None:
        """Connect no more."""
        self._loop = None

    def _try(self, _: int) -> None:
        loop = self._loop
        if loop is None:
            return
        self._attempt += 1
        attempt = self._attempt

        def deliver(found: str | OSError) -> None:
            try:
                loop.call_soon_threadsafe(self._take, attempt, found)
            except RuntimeError:  # the loop has ended meanwhile
                return

        self._timers.at(self._timers.now() + ANSWER_WITHIN_S, self._give_up, attempt)
        self._names.find(host_of(self.endpoint), deliver)

    def _take(self, attempt: int, found: str | OSError) -> None:
        if self._loop is None or attempt != self._attempt:
            return
        self._attempt += 1
        if isinstance(found, OSError):
            self._fail(found.strerror or str(found))
            return
        address = f"tcp://{found}:{self.endpoint.rpartition(':')[2]}"
        try:
            if self._allowed is not None:
                self._allowed.check(address)
        except LocalError as error:  # it may have another address later
            self._retry(error)
            return
        self._loop, self.address = None, address
        connect(self._socket, address)

    def _give_up(self, attempt: int) -> None:
        if self._loop is not None and attempt == self._attempt:
            self._attempt += 1
            self._fail(f"no answer within {ANSWER_WITHIN_S:g} s")

    def _fail(self, reason: str) -> None:
        self._retry(
            RemoteError(
                f"cannot resolve the host of {self.endpoint}: {reason}",
                code=ErrorCode.PEER_UNREACHABLE,
                endpoint=self.endpoint,
            )
        )

    def _retry(self, error: KVBusError) -> None:
        self._timers.at(self._timers.now() + self._retry_s, self._try)
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        self._on_error(error)
