"""The connection of a socket that connects: made, watched, and made again after a refusal.

ZeroMQ takes a refusal as final, and is silent about it. Here it is an error, and is tried again:
the key may be trusted by then.
"""

import asyncio
import contextlib
import errno
import ipaddress
import socket as tcp
from collections.abc import Callable
from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbus.bus.actor import Timers
from kvbus.bus.names import look_up
from kvbus.bus.pump import Pump
from kvbus.bus.sockets import (
    BusContext,
    Socket,
    SocketOptions,
    connect,
    host_of,
    is_numeric,
    reconnect,
)
from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError

RETRY_S, MAX_RETRY_S = 0.5, 10.0
MAX_NAME_RETRY_S = 30.0
BROKEN_OFF_S = 1.0
PROBE_S, MAX_PROBE_S = 0.2, 2.0
REFUSALS = 2
"""One may be a process that binds its port just then."""


class _Event(Enum):
    """What happened to the connection, by the monitor of its socket."""

    MADE = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    """Both sides know each other."""
    LOST = int(zmq.EVENT_DISCONNECTED)
    """It ended, or its handshake did; ZeroMQ connects again unless it was refused."""
    REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    """The other side does not take our key; ZeroMQ does not connect again."""
    MISMATCHED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    """One side has keys and the other has none; ZeroMQ does not connect again."""
    BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    """The other side hung up within the handshake, as one does that has another server key."""


_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_ALL = sum(event.value for event in _Event)
_FINAL = (_Event.REFUSED, _Event.MISMATCHED)


class Connection:
    """Connects to ``endpoint``; ``on_error`` is told of each refusal, and of names without address.

    A name is looked up in `start`, again until it has an address that is allowed; the socket keeps
    that address. `refusal` is the last refusal, until it is tried again. ``on_gone`` is told when
    the connection broke and nobody listens at its other end any more, as after the death of the
    process; `is_gone` is True then, until there is a connection again. ``on_made`` is told of each
    one.

    Only TCP is watched. Raises `ConfigError` for an endpoint that is none, and `LocalError` for one
    that ``options`` do not allow.
    """

    def __init__(
        self,
        context: BusContext,
        socket: Socket,
        endpoint: str,
        *,
        options: SocketOptions,
        timers: Timers,
        on_error: Callable[[KVBusError], None],
        on_failure: Callable[[Exception], None],
        on_gone: Callable[[], None] | None = None,
        on_made: Callable[[], None] | None = None,
    ) -> None:
        self.refusal: RemoteError | None = None
        self.is_gone, self._is_made = False, False
        self._on_gone, self._on_made = on_gone, on_made
        self._on_error, self._on_failure = on_error, on_failure
        self._context, self._socket, self._timers = context, socket, timers
        self._endpoint, self._allowed = endpoint, options.allowed
        self._address = endpoint if is_numeric(endpoint) else ""
        self._naming: asyncio.Task[None] | None = None
        self._probe = _ListenerProbe(context, timers, self._find_gone)
        self._retry_s, self._open = RETRY_S, True
        self._broken_since: float | None = None
        self._has_keys = options.curve is not None
        self._monitor: Pump | None = None
        if endpoint.startswith("tcp://"):  # before it is connected: what was earlier is not told
            monitor: Socket = socket.get_monitor_socket(_ALL)
            self._monitor = Pump(monitor, on_frames=self._read_event, on_failure=on_failure)
        try:
            if self._address:
                connect(socket, self._address, self._allowed)
        except LocalError:
            self.close()
            raise

    @property
    def missing(self) -> str:
        """What keeps a request from its answer; empty while there is a connection."""
        if not self._address:
            return "the name server has not told its address"
        return "" if self._is_made else "there is no connection"

    @property
    def is_gone_here(self) -> bool:
        """Whether `is_gone` is true of an address of this machine, or of this container."""
        if not self.is_gone:
            return False
        family, (host, _) = _place(self._address)
        with self._context.probe_socket(family, tcp.SOCK_DGRAM) as probe:
            try:
                probe.bind((host, 0))
            except OSError:
                return False
        return True

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look the name up, if there is one, and to watch."""
        if not self._address:
            self._naming = loop.create_task(self._connect_by_name())
        if self._monitor is not None:
            self._monitor.start(loop)

    def close(self) -> None:
        """Connect no more; call it before the socket is closed."""
        self._open = False
        self._probe.end()
        if self._naming is not None:
            self._naming.cancel()
        if self._monitor is not None:
            with contextlib.suppress(zmq.ZMQError):  # an endpoint that is none has closed it
                self._socket.disable_monitor()
            self._monitor.close()

    async def _connect_by_name(self) -> None:
        retry_s, port = RETRY_S, self._endpoint.rpartition(":")[2]
        try:
            while not self._address:
                try:
                    address = f"tcp://{await look_up(host_of(self._endpoint))}:{port}"
                    if self._allowed is not None:
                        self._allowed.check(address)  # the name may have another address later
                    self._address = address
                except KVBusError as error:
                    self._on_error(error)
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, MAX_NAME_RETRY_S)
            connect(self._socket, self._address)
        except Exception as error:  # a bug of ours: it must end the owner
            self._on_failure(error)

    def _read_event(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        event = _Event(message["event"])
        if event is _Event.MISMATCHED and message["value"] != _OTHER_MECHANISM:
            return
        if self._open:
            self._see(event)

    def _see(self, event: _Event) -> None:
        if event is _Event.MADE:
            self._is_made, self.is_gone = True, False
            self._probe.end()
            self._retry_s, self._broken_since, self.refusal = RETRY_S, None, None
            if self._on_made is not None:
                self._on_made()
        elif event is _Event.LOST and self._is_made and self._on_gone is not None:
            self._is_made = False
            self._probe.begin(self._address)
        elif event is _Event.BROKEN_OFF and self._has_keys:
            self._see_broken_off()
        elif event in _FINAL:
            self.refusal = self._error(event)
            self._timers.at(self._timers.now() + self._retry_s, self._try_again)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            self._on_error(self.refusal)

    def _see_broken_off(self) -> None:
        """Tell of it once it goes on: once may be a server that ended, or was full, just then."""
        now = self._timers.now()
        if self._broken_since is None:
            self._broken_since = now
        elif now - self._broken_since >= BROKEN_OFF_S:
            self._on_error(self._error(_Event.BROKEN_OFF))

    def _find_gone(self) -> None:
        self.is_gone = True
        if self._on_gone is not None:
            self._on_gone()

    def _try_again(self, _: int) -> None:
        if self._open:
            self.refusal = None
            reconnect(self._socket, self._address)

    def _error(self, event: _Event) -> RemoteError:
        problem = {
            _Event.REFUSED: "refused our key: it is not among its authorized keys, or not "
            "with the role that this socket asks for (kvbus keys trust)",
            _Event.MISMATCHED: "uses no keys, but we were given its server key"
            if self._has_keys
            else "uses keys: ask it with a key of our own and its server key",
            _Event.BROKEN_OFF: "hangs up on our handshake: it has another server key than "
            "the one that we know, or it has no room for us",
        }[event]
        code = ErrorCode.FORBIDDEN if event in _FINAL else ErrorCode.PEER_UNREACHABLE
        return RemoteError(
            f"the agent at {self._endpoint} {problem}", code=code, endpoint=self._endpoint
        )


# Asks where a connection broke. Who does not answer may be cut off, and who listens will be
# connected to again; a refusal says that the process is gone.
class _ListenerProbe:
    """Calls ``on_gone`` once after `begin`, unless `end` came first or somebody listens."""

    def __init__(self, context: BusContext, timers: Timers, on_gone: Callable[[], None]) -> None:
        self._context, self._timers, self._on_gone = context, timers, on_gone
        self._address = ""
        self._turn = self._num_refused = 0
        self._period_s = PROBE_S
        self._probe: tcp.socket | None = None

    def begin(self, address: str) -> None:
        """The connection to ``address``, tcp:// and numbers, broke."""
        self.end()
        self._address, self._num_refused, self._period_s = address, 0, PROBE_S
        self._timers.at(self._timers.now() + self._period_s, self._look, self._turn)

    def end(self) -> None:
        """There is a connection again, or it is not wanted any more."""
        self._turn += 1
        self._drop()

    def _look(self, turn: int) -> None:
        """What became of the last probe; then the next one."""
        if turn != self._turn:
            return
        result = _result(self._probe) if self._probe is not None else errno.ECONNREFUSED
        self._num_refused += self._probe is not None and result == errno.ECONNREFUSED
        self._drop()
        if result == 0:
            return
        if self._num_refused >= REFUSALS:
            self._on_gone()
            return
        if result != errno.ECONNREFUSED:
            self._period_s = min(2 * self._period_s, MAX_PROBE_S)
        self._try()
        self._timers.at(self._timers.now() + self._period_s, self._look, turn)

    def _try(self) -> None:
        family, place = _place(self._address)
        self._probe = self._context.probe_socket(family, tcp.SOCK_STREAM)
        self._probe.setblocking(False)
        if self._probe.connect_ex(place) == errno.ECONNREFUSED:
            self._num_refused += 1
            self._drop()

    def _drop(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def _result(probe: tcp.socket) -> int:
    """0 when it is connected, why it is not otherwise."""
    if failure := probe.getsockopt(tcp.SOL_SOCKET, tcp.SO_ERROR):
        return failure
    try:
        probe.getpeername()
    except OSError as error:
        return error.errno or errno.ENOTCONN
    return 0


def _place(address: str) -> tuple[tcp.AddressFamily, tuple[str, int]]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    is_six = ipaddress.ip_address(host.partition("%")[0]).version == 6
    return tcp.AF_INET6 if is_six else tcp.AF_INET, (host, int(port))
