"""The connection of a socket that connects: its address, whether it is there, who is at its end.

One health: when the peer was last heard, the boot id of its process, whether it refuses this one,
and whether its process is gone.
"""

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
"""Seconds between lookups of a name: without a connection, and while the peer is silent or the name
server fails.
"""
BROKEN_OFF_S = 1.0
GONE_S = 0.3
"""A process that ends and comes back by then was not gone, but is another."""
MAX_EARLIER_BOOTS = 8


class _Event(Enum):
    """What happened to the connection, by the monitor of its socket."""

    NOT_TAKEN = int(zmq.EVENT_CLOSED)
    """There was no TCP connection; ZeroMQ tries again."""
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


class Connecting(SocketActor):
    """Base of what connects a socket to ``endpoint``; it is told by ``_on_...``, to be overridden.

    A name is looked up at the start, and again while its address does not answer. The socket moves
    to a new address if that is allowed. Only TCP is watched: ZeroMQ takes a refusal
    as final. Here it is `refusal` until it is tried again: the key may be trusted by then.

    Raises `ConfigError` for an endpoint that is none, and `LocalError` for one that ``options`` do
    not allow.
    """

    def __init__(
        self, context: BusContext, socket: Socket, endpoint: str, options: SocketOptions
    ) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.refusal: RemoteError | None = None
        self.peer_boot: str | None = None
        """The boot id of the other side, once it was heard."""
        self.heard_at = math.inf
        self.is_gone = False
        """Whether its process was found to be gone, and did not come back since."""
        self._is_made = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context, self._socket, self._options = context, socket, options
        self._address = endpoint if is_numeric(endpoint) else ""
        self._earlier: deque[str] = deque(maxlen=MAX_EARLIER_BOOTS)
        self._naming: asyncio.Task[None] | None = None
        self._must_look_up, self._looked_up = asyncio.Event(), asyncio.Event()
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
        if endpoint.startswith("tcp://"):  # before it is connected: what was earlier is not told
            monitor: Socket = socket.get_monitor_socket(_ALL)
            self._monitor = Pump(monitor, on_frames=self._read_event, on_failure=self._fail)
        try:
            if self._address:
                connect(socket, self._address, options.allowed)
        except LocalError:
            Connecting._close(self)
            raise

    def _on_frames(self, frames: list[bytes]) -> None:
        """A message came."""
        raise NotImplementedError

    def _on_writable(self) -> None:
        """The socket takes more."""

    def _on_made(self) -> None:
        """There is a connection."""

    def _on_error(self, error: KVBusError) -> None:
        """It is refused, or its name has no address."""

    def _on_moved(self) -> None:
        """The name has another address."""

    def _on_boot(self, boot: str, before: str | None) -> None:
        """The peer has another boot id than it had."""

    def _on_gone(self) -> None:
        """The connection broke and nobody listens there any more, as after the process's death."""

    @property
    def missing(self) -> str:
        """What keeps a request from its answer, in words; empty while there is a connection."""
        if self._is_made:
            return ""
        if not self._address:
            return self._name_problem or "the name server has not told its address"
        return "there is no connection" + (f", and {self._name_problem}" * bool(self._name_problem))

    @property
    def address(self) -> str:
        """The endpoint with the address that the name has; empty before it has one."""
        return self._address

    @property
    def is_gone_here(self) -> bool:
        """As `is_gone`, and it was on this machine, whose kernel says so: no network is between."""
        return self.is_gone and self._context.is_here(host_of(self._address).strip("[]"))

    def look_again(self) -> None:
        """Look the name up: what is at its address may be another agent by now."""
        self._must_look_up.set()

    async def has_moved(self, earlier: str) -> bool:
        """Whether the name has another address than ``earlier``; looks it up if it has not."""
        if self._naming is not None and self._address == earlier:
            looked_up = self._looked_up
            self.look_again()
            await looked_up.wait()
        return self._address != earlier

    def _hear(self, boot: str) -> bool:
        """Take note of a message; False for one of an earlier process, which changes nothing."""
        if boot != self.peer_boot:
            if boot in self._earlier:
                return False
            before, self.peer_boot = self.peer_boot, boot
            if before is not None:
                self._earlier.append(before)
            self._on_boot(boot, before)
        self.heard_at = asyncio.get_running_loop().time()
        return True

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.heard_at = loop, loop.time()
        self._pump.start(loop)
        if not self._address:
            self._naming = loop.create_task(self._follow_name())
        if self._monitor is not None:
            self._monitor.start(loop)

    def _close(self) -> None:
        self._end_probe()
        if self._naming is not None:
            self._naming.cancel()
        self._looked_up.set()
        if self._monitor is not None:
            with contextlib.suppress(zmq.ZMQError):  # an endpoint that is none has closed it
                self._socket.disable_monitor()
            self._monitor.close()
            self._monitor = None
        self._pump.close()

    # A restarted pod has another address. Its old address refuses connections, drops packets, or
    # belongs to another pod. So three things start a lookup:
    #
    #     refused, lost, another key   an event of the monitor
    #     another pod                  a ticket with a boot id that is unknown there
    #     dropped packets              silence
    async def _follow_name(self) -> None:
        try:
            period_s = NAME_PERIOD_S
            while not self.closed:
                self._must_look_up.clear()
                try:
                    await self._find_address()
                    self._name_problem, period_s = "", NAME_PERIOD_S
                except KVBusError as error:
                    self._name_problem = error.message
                    period_s = min(2 * period_s, MAX_NAME_PERIOD_S)
                    if not self._address or error.code is ErrorCode.FORBIDDEN:
                        self._on_error(error)
                looked_up, self._looked_up = self._looked_up, asyncio.Event()
                looked_up.set()
                await asyncio.sleep(RETRY_S)
                await self._name_is_due(period_s)
        except Exception as error:  # a bug of ours: it must end the owner
            self._fail(error)

    async def _name_is_due(self, period_s: float) -> None:
        """Return when the name must be looked up, or there was silence for so long."""
        loop = asyncio.get_running_loop()
        began_at = now = loop.time()
        while not self._must_look_up.is_set():
            due_at = began_at + period_s
            if self._is_made:
                due_at = max(began_at, self.heard_at) + MAX_NAME_PERIOD_S
            if due_at <= now:
                return
            with anyio.move_on_after(due_at - now):
                await self._must_look_up.wait()
            now = loop.time()

    async def _find_address(self) -> None:
        """Look the name up, and move to its address; raises `KVBusError`."""
        found, port = await _look_up(host_of(self.endpoint)), self.endpoint.rpartition(":")[2]
        addresses = [f"tcp://{one}:{port}" for one in found]
        if self._address in addresses:
            return
        if self._options.allowed is not None:
            self._options.allowed.check(addresses[0])
        self._left, self._address = self._address, addresses[0]
        if self._left:
            with contextlib.suppress(zmq.ZMQError):  # it was refused there
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
        if event is not _Event.MADE:
            self.look_again()
        if event is _Event.NOT_TAKEN and self._lost_at is not None:
            self._probe_listener(lost_s=now - self._lost_at)
        elif event is _Event.MADE:
            self._is_made, self.is_gone, self.refusal = True, False, None
            self._retry_s, self._lost_at, self._broken_since = RETRY_S, None, None
            self._end_probe()
            self._on_made()
        elif event is _Event.LOST and self._is_made:
            self._is_made, self._lost_at = False, now
        elif event is _Event.BROKEN_OFF and self._options.curve is not None:
            self._see_broken_off(now)
        elif event is _Event.REFUSED or (
            event is _Event.MISMATCHED and message["value"] == _OTHER_MECHANISM
        ):
            self.refusal = self._error(event)
            self._call_at(now + self._retry_s, self._try_again)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            self._on_error(self.refusal)

    # A system that refuses says that nobody listens there. Who does not answer may be cut off, and
    # one that hangs up at once may stand between. ZeroMQ does not tell these apart.
    def _probe_listener(self, *, lost_s: float) -> None:
        """ZeroMQ got no connection: look what the last probe got, and begin the next."""
        if self._end_probe() and lost_s >= GONE_S:
            self._lost_at, self.is_gone = None, True
            self._on_gone()
        else:
            host, _, port = self._address.removeprefix("tcp://").rpartition(":")
            with contextlib.suppress(OSError):  # there are no descriptors: the next one will do
                self._probe = self._context.probe(host.strip("[]"), int(port))

    def _end_probe(self) -> bool:
        """Whether the probe that is under way was refused."""
        probe, self._probe = self._probe, None
        return probe is not None and probe.end()

    def _see_broken_off(self, now: float) -> None:
        """Tell of it once it goes on: once may be a server that ended, or was full, just then."""
        if self._broken_since is None:
            self._broken_since = now
        elif now - self._broken_since >= BROKEN_OFF_S:
            self._on_error(self._error(_Event.BROKEN_OFF))

    def _try_again(self) -> None:
        if self._monitor is not None:
            self.refusal = None
            with contextlib.suppress(zmq.ZMQError):  # there is nothing left to disconnect
                self._socket.disconnect(self._address)
            connect(self._socket, self._address)

    def _error(self, event: _Event) -> RemoteError:
        has_keys = self._options.curve is not None
        problem = {
            _Event.REFUSED: "refused our key: it is not among its authorized keys, or not "
            "with the role that this socket asks for (kvbus keys trust)",
            _Event.MISMATCHED: "uses no keys, but we were given its server key"
            if has_keys
            else "uses keys: ask it with a key of our own and its server key",
            _Event.BROKEN_OFF: "hangs up on our handshake: it has another server key than "
            "the one that we know, or it has no room for us",
        }[event]
        code = ErrorCode.FORBIDDEN if event in _FINAL else ErrorCode.PEER_UNREACHABLE
        return RemoteError(
            f"the agent at {self.endpoint} {problem}", code=code, endpoint=self.endpoint
        )


# libzmq resolves a name in its one I/O thread, again at each reconnect: one name server that is
# dead holds up all sockets of a process for seconds. So it gets numbers only.
ANSWER_WITHIN_S = 5.0
MAX_LOOKUPS = 32

_places = threading.BoundedSemaphore(MAX_LOOKUPS)


def look_up_all(host: str) -> list[str]:
    """All addresses of ``host``, as they stand in endpoints; blocks.

    Raises `OSError`, or `UnicodeError` for what is no host name.
    """
    found = tcp.getaddrinfo(host.strip("[]"), None, type=tcp.SOCK_STREAM)
    texts = (
        f"[{address[0]}]" if family == tcp.AF_INET6 else str(address[0])
        for family, *_, address in found
    )
    return list(dict.fromkeys(texts))


async def look_up(host: str) -> str:
    """The first address of ``host``; raises `RemoteError` (``peer_unreachable``) that says why.

    That is after `ANSWER_WITHIN_S` at the latest.
    """
    return (await _look_up(host))[0]


async def _look_up(host: str) -> list[str]:
    try:
        found = asyncio.wrap_future(_begin_to_look_up(host))
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


# A lookup cannot be ended, so its thread is a daemon: no process waits for a name server to end.
def _begin_to_look_up(host: str) -> concurrent.futures.Future[list[str]]:
    if not _places.acquire(blocking=False):
        raise OSError(f"{MAX_LOOKUPS} other names are being looked up")
    answer = concurrent.futures.Future[list[str]]()
    answer.set_running_or_notify_cancel()  # who waits no longer does not cancel it

    def run() -> None:
        try:
            answer.set_result(look_up_all(host))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)
        finally:
            _places.release()

    threading.Thread(target=run, name="kvbus-name", daemon=True).start()
    return answer
