"""Connection state of a connecting socket."""

import asyncio
import concurrent.futures
import contextlib
import math
import socket as tcp
import threading
from collections import deque
from enum import Enum

import anyio
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbus.bus.actor import SocketActor
from kvbus.bus.pump import Pump, Socket
from kvbus.bus.sockets import BusContext, Probe, SocketOptions, connect, host_of, is_numeric
from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError

RETRY_S, MAX_RETRY_S = 0.5, 10.0
NAME_PERIOD_S, MAX_NAME_PERIOD_S = 1.0, 5.0
"""Between lookups: without a connection, and with a silent peer or failing name server."""
BROKEN_OFF_S = 1.0
GONE_S = 0.3
"""A process that returns sooner is not reported as gone."""
MAX_EARLIER_BOOTS = 8


class _Event(Enum):
    NOT_TAKEN = int(zmq.EVENT_CLOSED)
    """No TCP connection. ZeroMQ retries."""
    CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    LOST = int(zmq.EVENT_DISCONNECTED)
    """ZeroMQ reconnects, unless it was refused."""
    REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    """The peer rejects our key. ZeroMQ does not retry."""
    MISMATCHED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    """Only one side has keys. ZeroMQ does not retry."""
    HANDSHAKE_DROPPED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    """The peer closed during the handshake, as with another server key."""


_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_ALL = sum(event.value for event in _Event)
_FINAL = (_Event.REFUSED, _Event.MISMATCHED)


class WatchedConnection(SocketActor):
    """Base of the sockets that connect to ``endpoint``. Only TCP is monitored.

    A host name is resolved again while its address does not respond. ZeroMQ does not retry after a
    refusal, so this class does: the peer may trust the key by then.
    """

    def __init__(
        self, context: BusContext, socket: Socket, endpoint: str, options: SocketOptions
    ) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.refusal: RemoteError | None = None
        self.peer_boot: str | None = None
        self.received_at = math.inf
        self.is_gone = False
        self._is_made = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context, self._socket, self._options = context, socket, options
        self._address = endpoint if is_numeric(endpoint) else ""
        self._earlier: deque[str] = deque(maxlen=MAX_EARLIER_BOOTS)
        self._naming: asyncio.Task[None] | None = None
        self._lookup_due, self._lookup_done = asyncio.Event(), asyncio.Event()
        self._name_problem, self._left = "", ""
        self._retry_s = RETRY_S
        self._lost_at: float | None = None
        self._probe: Probe | None = None
        self._broken_since: float | None = None
        self._pump = Pump(
            socket,
            on_frames=self._on_frames,
            on_failure=self._fail,
            on_writable=self._on_writable,
        )
        self._monitor: Pump | None = None
        if endpoint.startswith("tcp://"):  # before connecting: earlier events are not reported
            monitor: Socket = socket.get_monitor_socket(_ALL)
            self._monitor = Pump(monitor, on_frames=self._read_event, on_failure=self._fail)
        try:
            if self._address:
                connect(socket, self._address, options.allowed)
        except LocalError:
            WatchedConnection._close(self)
            raise

    def _on_frames(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _on_writable(self) -> None:
        """Called when the socket accepts more."""

    def _on_made(self) -> None:
        """Called on a new connection."""

    def _on_error(self, error: KVBusError) -> None:
        """Called on a refusal, or if the name has no address."""

    def _on_moved(self) -> None:
        """Called on a new address."""

    def _on_boot(self, boot: str, before: str | None) -> None:
        """Called on a new boot id."""

    def _on_gone(self) -> None:
        """Called when the connection broke and the port refuses: the process is probably dead."""

    @property
    def missing(self) -> str:
        """Why requests get no reply; empty while connected."""
        if self._is_made:
            return ""
        if not self._address:
            return self._name_problem or "the name server has not returned its address yet"
        return "there is no connection" + (f", and {self._name_problem}" * bool(self._name_problem))

    @property
    def address(self) -> str:
        return self._address

    @property
    def is_gone_here(self) -> bool:
        return self.is_gone and self._context.is_here(host_of(self._address).strip("[]"))

    def resolve_again(self) -> None:
        """Resolve the name: another agent may have its address by now."""
        self._lookup_due.set()

    async def has_moved(self, known: str) -> bool:
        if self._naming is not None and self._address == known:
            lookup_done = self._lookup_done
            self.resolve_again()
            await lookup_done.wait()
        return self._address != known

    def _note_boot(self, boot: str) -> bool:
        """Return False for a message of an earlier process."""
        if boot != self.peer_boot:
            if boot in self._earlier:
                return False
            before, self.peer_boot = self.peer_boot, boot
            if before is not None:
                self._earlier.append(before)
            self._on_boot(boot, before)
        self.received_at = asyncio.get_running_loop().time()
        return True

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.received_at = loop, loop.time()
        self._pump.start(loop)
        if not self._address:
            self._naming = loop.create_task(self._follow_name())
        if self._monitor is not None:
            self._monitor.start(loop)

    def _close(self) -> None:
        self._end_probe()
        if self._naming is not None:
            self._naming.cancel()
        self._lookup_done.set()
        if self._monitor is not None:
            with contextlib.suppress(zmq.ZMQError):  # connecting to an invalid endpoint closed it
                self._socket.disable_monitor()
            self._monitor.close()
            self._monitor = None
        self._pump.close()

    # A restarted pod has another address. Its old address refuses connections, drops packets, or
    # belongs to another pod. So three events start a lookup:
    #
    #     refused, lost, another key   an event of the monitor
    #     another pod                  a ticket with a boot id that is unknown there
    #     dropped packets              silence
    async def _follow_name(self) -> None:
        try:
            period_s = NAME_PERIOD_S
            while not self.closed:
                self._lookup_due.clear()
                try:
                    await self._find_address()
                    self._name_problem, period_s = "", NAME_PERIOD_S
                except KVBusError as error:
                    self._name_problem = error.message
                    period_s = min(2 * period_s, MAX_NAME_PERIOD_S)
                    if not self._address or error.code is ErrorCode.FORBIDDEN:
                        self._on_error(error)
                lookup_done, self._lookup_done = self._lookup_done, asyncio.Event()
                lookup_done.set()
                await asyncio.sleep(RETRY_S)
                await self._name_is_due(period_s)
        except Exception as error:  # a kvbus bug: it must fail the owner
            self._fail(error)

    async def _name_is_due(self, period_s: float) -> None:
        loop = asyncio.get_running_loop()
        began_at = now = loop.time()
        while not self._lookup_due.is_set():
            due_at = began_at + period_s
            if self._is_made:
                due_at = max(began_at, self.received_at) + MAX_NAME_PERIOD_S
            if due_at <= now:
                return
            with anyio.move_on_after(due_at - now):
                await self._lookup_due.wait()
            now = loop.time()

    async def _find_address(self) -> None:
        found, port = await _resolve(host_of(self.endpoint)), self.endpoint.rpartition(":")[2]
        addresses = [f"tcp://{one}:{port}" for one in found]
        if self._address in addresses:
            return
        if self._options.allowed is not None:
            self._options.allowed.check(addresses[0])
        self._left, self._address = self._address, addresses[0]
        if self._left:
            with contextlib.suppress(zmq.ZMQError):  # the peer there refused us
                self._socket.disconnect(self._left)
            self._is_made, self.refusal = False, None
            self._end_probe()
            self._on_moved()
        connect(self._socket, self._address)

    def _read_event(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        if self._left and message["endpoint"] == self._left.encode():
            return
        event, now = _Event(message["event"]), asyncio.get_running_loop().time()
        if event is not _Event.CONNECTED:
            self.resolve_again()
        if event is _Event.NOT_TAKEN and self._lost_at is not None:
            self._probe_listener(lost_s=now - self._lost_at)
        elif event is _Event.CONNECTED:
            self._is_made, self.is_gone, self.refusal = True, False, None
            self._retry_s, self._lost_at, self._broken_since = RETRY_S, None, None
            self._end_probe()
            self._on_made()
        elif event is _Event.LOST and self._is_made:
            self._is_made, self._lost_at = False, now
        elif event is _Event.HANDSHAKE_DROPPED and self._options.curve is not None:
            self._see_broken_off(now)
        elif event is _Event.REFUSED or (
            event is _Event.MISMATCHED and message["value"] == _OTHER_MECHANISM
        ):
            self.refusal = self._error(event)
            self._call_at(now + self._retry_s, self._try_again)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            self._on_error(self.refusal)

    # A refusal by the peer's kernel proves that no process listens there. A peer that does not
    # respond may be cut off, and one that closes at once may be a proxy. ZeroMQ reports these
    # cases alike, so a probe separates them.
    def _probe_listener(self, *, lost_s: float) -> None:
        if self._end_probe() and lost_s >= GONE_S:
            self._lost_at, self.is_gone = None, True
            self._on_gone()
        else:
            host, _, port = self._address.removeprefix("tcp://").rpartition(":")
            with contextlib.suppress(OSError):  # out of descriptors: a later probe will do
                self._probe = self._context.probe(host.strip("[]"), int(port))

    def _end_probe(self) -> bool:
        probe, self._probe = self._probe, None
        return probe is not None and probe.end()

    def _see_broken_off(self, now: float) -> None:
        """Report if it persists: the server may be restarting or full."""
        if self._broken_since is None:
            self._broken_since = now
        elif now - self._broken_since >= BROKEN_OFF_S:
            self._on_error(self._error(_Event.HANDSHAKE_DROPPED))

    def _try_again(self) -> None:
        if self._monitor is not None:
            self.refusal = None
            with contextlib.suppress(zmq.ZMQError):  # already disconnected
                self._socket.disconnect(self._address)
            connect(self._socket, self._address)

    def _error(self, event: _Event) -> RemoteError:
        has_keys = self._options.curve is not None
        problem = {
            _Event.REFUSED: "refused our key: it is not among its authorized keys, or not "
            "with the role that this socket requires (kvbus keys trust)",
            _Event.MISMATCHED: "uses no keys, but we were given its server key"
            if has_keys
            else "uses keys: give a key of our own and its server key",
            _Event.HANDSHAKE_DROPPED: "closes our handshake: it has another server key than the "
            "one that we know, or it is full",
        }[event]
        code = ErrorCode.FORBIDDEN if event in _FINAL else ErrorCode.PEER_UNREACHABLE
        return RemoteError(
            f"the agent at {self.endpoint} {problem}", code=code, endpoint=self.endpoint
        )


# libzmq resolves names in its only I/O thread, and again at each reconnect. One dead name server
# would block all sockets of the process for seconds. So libzmq gets only numeric addresses.
ANSWER_WITHIN_S = 5.0
MAX_LOOKUPS = 32

_places = threading.BoundedSemaphore(MAX_LOOKUPS)


def resolve_all(host: str) -> list[str]:
    """Block, and return endpoint notation. Raises `OSError` or `UnicodeError`."""
    found = tcp.getaddrinfo(host.strip("[]"), None, type=tcp.SOCK_STREAM)
    texts = (
        f"[{address[0]}]" if family == tcp.AF_INET6 else str(address[0])
        for family, *_, address in found
    )
    return list(dict.fromkeys(texts))


async def resolve(host: str) -> str:
    """Raise `RemoteError` within `ANSWER_WITHIN_S`."""
    return (await _resolve(host))[0]


async def _resolve(host: str) -> list[str]:
    try:
        found = asyncio.wrap_future(_start_lookup(host))
        return await asyncio.wait_for(found, ANSWER_WITHIN_S)
    except TimeoutError:
        reason = f"no answer within {ANSWER_WITHIN_S:g} s"
    except UnicodeError:
        reason = "it is not a host name"
    except OSError as error:
        reason = error.strerror or str(error)
    raise RemoteError(
        f"cannot resolve '{host}': {reason}", code=ErrorCode.PEER_UNREACHABLE, host=host
    )


# A lookup cannot be cancelled. Its thread is a daemon, so a slow name server never delays process
# exit.
def _start_lookup(host: str) -> concurrent.futures.Future[list[str]]:
    if not _places.acquire(blocking=False):
        raise OSError(f"{MAX_LOOKUPS} other names are being resolved")
    answer = concurrent.futures.Future[list[str]]()
    answer.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it

    def run() -> None:
        try:
            answer.set_result(resolve_all(host))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)
        finally:
            _places.release()

    threading.Thread(target=run, name="kvbus-name", daemon=True).start()
    return answer
