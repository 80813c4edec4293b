"""Opening ZeroMQ sockets: every option that kvbus relies on is set here.

Refuses endpoints that cannot be bound or parsed, as `ConfigError`.
"""

import contextlib
import errno
import ipaddress
import select
import socket as tcp
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from kvbus.bus.pump import Socket
from kvbus.bus.trust import AllowedPeers, ClientCurve, ServerCurve
from kvbus.errors import ConfigError, LocalError
from kvbus.protocol.envelope import (
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    MAX_PEER_ITEMS,
    MAX_PEER_REQUEST_BYTES,
)

# A frame somewhat over the limit is read and answered; one far over it ends the connection.
_OVER_BYTES = 64 * 1024
# The largest that ZeroMQ's own handshake needs; a topic has at most 64 characters.
_MAX_TOPIC_FRAME_BYTES = 1024
_HANDSHAKE_MS = 5_000
_LINGER_MS = 200
_RECONNECT_MS, _MAX_RECONNECT_MS = 50, 1_000
_KEEPALIVE_S = 5
# What a peer may have queued here, and we for it, before its connection has to wait: in messages.
_MAX_UNREAD, _MAX_UNREAD_BYTES, _MAX_UNSENT = 1000, 128 * 1024, 1000
# An XPUB takes subscriptions in within any call, until none is there: a stream of them would hold
# the call. With so few at a time the I/O thread has to be asked for each next ones, and is slower.
# With CURVE a queue of one takes none at all.
_MAX_UNREAD_SUBSCRIPTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """What may be tuned on a socket; ``hwm`` is in messages, for each peer and direction.

    With ``curve`` it is encrypted, and both sides know each other by their keys. With ``allowed``
    it connects to these addresses only.
    """

    hwm: int = 10_000
    curve: ServerCurve | ClientCurve | None = None
    allowed: AllowedPeers | None = None


class Probe:
    """One TCP connection, to see whether it is refused: nobody listens there then."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = tcp.socket(_family(host), tcp.SOCK_STREAM)
        self._socket.setblocking(False)
        self._begun = self._socket.connect_ex((host, port))

    def end(self) -> bool:
        """Close it; returns whether it was refused by now."""
        with self._socket as ended:
            by_now = ended.getsockopt(tcp.SOL_SOCKET, tcp.SO_ERROR)
        return errno.ECONNREFUSED in (self._begun, by_now)


class BusContext(zmq.Context[Any]):
    """Makes all sockets of the bus, and sees what ZeroMQ does not tell of numeric addresses."""

    def probe(self, host: str, port: int) -> Probe:
        """Look whether somebody listens there."""
        return Probe(host, port)

    def is_here(self, host: str) -> bool:
        """Whether an address is of this machine, or of this container."""
        with tcp.socket(_family(host), tcp.SOCK_DGRAM) as one:
            try:
                one.bind((host, 0))
            except OSError:
                return False
        return True


def _family(host: str) -> tcp.AddressFamily:
    return tcp.AF_INET6 if ":" in host else tcp.AF_INET


def new_context() -> BusContext:
    """A ZeroMQ context with one I/O thread; share it by all sockets of a process.

    Leaving its ``with`` block waits until closed sockets have flushed, 0.2 s at most.
    """
    return BusContext()


def max_request_bytes(endpoint: str) -> int:
    """The largest request there: over TCP, where strangers may ask, it is smaller."""
    return MAX_PEER_REQUEST_BYTES if endpoint.startswith("tcp://") else MAX_FRAME_BYTES


def max_request_items(endpoint: str) -> int:
    """The most items of a request there."""
    return MAX_PEER_ITEMS if endpoint.startswith("tcp://") else MAX_ITEMS


def open_router(context: BusContext, endpoint: str, options: SocketOptions) -> Socket:
    """A ROUTER bound to ``endpoint`` that reports unroutable peers instead of dropping."""
    socket = _open(context, zmq.ROUTER, options)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.MAXMSGSIZE, max_request_bytes(endpoint) + _OVER_BYTES)
    if endpoint.startswith("tcp://"):
        socket.set(zmq.RCVHWM, _MAX_UNREAD)
        socket.set(zmq.SNDHWM, _MAX_UNSENT)
        socket.set(zmq.RCVBUF, _MAX_UNREAD_BYTES)
    return _bind(socket, endpoint)


def open_dealer(context: BusContext, endpoint: str, options: SocketOptions) -> Socket:
    """A DEALER for ``endpoint`` that queues only to a connection that exists; not connected yet.

    Over ipc it queues before, too: it does not connect again, and so it keeps what came last.
    """
    _require_port(endpoint)
    socket = _open(context, zmq.DEALER, options)
    socket.set(zmq.IMMEDIATE, int(endpoint.startswith("tcp://")))
    return socket


def open_publisher(context: BusContext, endpoint: str, options: SocketOptions) -> Socket:
    """An XPUB bound to ``endpoint``; it drops silently for a subscriber that is ``hwm`` behind.

    It tells of each subscription. A topic takes ZeroMQ fifty times the memory of its bytes.
    """
    socket = _open(context, zmq.XPUB, options)
    socket.set(zmq.XPUB_VERBOSE, 1)
    socket.set(zmq.MAXMSGSIZE, _MAX_TOPIC_FRAME_BYTES)
    socket.set(zmq.RCVHWM, _MAX_UNREAD_SUBSCRIPTIONS)
    return _bind(socket, endpoint)


def open_subscriber(
    context: BusContext, endpoint: str, topics: frozenset[str], options: SocketOptions
) -> Socket:
    """A SUB for ``endpoint``, for ``topics``, or for all when there are none; not connected yet."""
    _require_port(endpoint)
    socket = _open(context, zmq.SUB, options)
    for topic in topics or ("",):
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
    return socket


def key_of(frame: zmq.Frame | None) -> str:
    """Whose connection a frame came by, of a socket with keys: the ``User-Id`` of a `KeyCheck`.

    A client may choose its routing id, so that only what comes with the message itself will do.
    """
    return str(frame["User-Id"]) if frame is not None else ""


def descriptor_of(frame: zmq.Frame) -> int | None:
    """The connection that a frame came by; ZeroMQ does not say it of what it made up itself."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def has_hung_up(frame: zmq.Frame | None) -> bool:
    """Whether the connection that a frame came by has ended.

    ZeroMQ hands out what it has queued all the same. A descriptor that is in use again gives the
    state of its new connection.
    """
    fd = descriptor_of(frame) if frame is not None else None
    if fd is None:
        return False
    look = select.poll()
    look.register(fd, select.POLLRDHUP)
    return bool(look.poll(0))


def connect(socket: Socket, endpoint: str, allowed: AllowedPeers | None = None) -> None:
    """Connect to an endpoint without a name; raises `LocalError` and closes the socket."""
    with _closed_on_error(socket, f"cannot connect to {endpoint}", endpoint):
        if allowed is not None:
            allowed.check(endpoint)
        socket.set(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)


def is_numeric(endpoint: str) -> bool:
    """Whether ZeroMQ can connect to ``endpoint`` without asking a name server."""
    if not endpoint.startswith("tcp://"):
        return "://" in endpoint
    try:
        ipaddress.ip_address(host_of(endpoint).strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def host_of(endpoint: str) -> str:
    """HOST of tcp://HOST:PORT; empty when there is none, or no port."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def with_brackets(host: str) -> str:
    """Return ``host`` as it stands in an endpoint: an IPv6 address has brackets there."""
    try:
        is_bare = ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        return host
    return f"[{host}]" if is_bare else host


def bound_endpoint(socket: Socket) -> str:
    """The endpoint that a bound socket really has, with the port that the system chose."""
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    return bytes(endpoint).rstrip(b"\0").decode()


def _open(context: BusContext, kind: int, options: SocketOptions) -> Socket:
    try:
        socket: Socket = context.socket(kind)
    except zmq.ZMQError as error:  # there are no descriptors
        raise ConfigError(f"cannot open a socket: {zmq.strerror(error.errno or 0)}") from error
    socket.set(zmq.LINGER, _LINGER_MS)
    socket.set(zmq.SNDHWM, options.hwm)
    socket.set(zmq.RCVHWM, options.hwm)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _OVER_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
    _keep_alive(socket)
    if options.curve is not None:
        with _closed_on_error(socket, "cannot use the keys", ""):
            options.curve.apply(socket)
    return socket


# Not ZeroMQ's heartbeats: its timer for them goes on when a connection has failed that was not read
# at that moment, as its queue was full. Then libzmq 4.3.5 ends the process ("!_io_error"). Whoever
# asks without reading the answers, and goes, can have that.
def _keep_alive(socket: Socket) -> None:
    """A peer that is gone without a word is found by TCP, after four times `_KEEPALIVE_S`."""
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.set(zmq.TCP_MAXRT, 4 * 1000 * _KEEPALIVE_S)


def _bind(socket: Socket, endpoint: str) -> Socket:
    """Bind to ``endpoint``; of tcp://HOST:FIRST-LAST to the first port that is free."""
    with _closed_on_error(socket, f"cannot bind {endpoint}", endpoint):
        # Of "*" ZeroMQ makes one socket for IPv6 and IPv4, or for IPv4 where there is no IPv6.
        socket.set(zmq.IPV6, "[" in endpoint or host_of(endpoint) == "*")
        *others, last = port_range(endpoint)
        for one in others:
            with contextlib.suppress(zmq.ZMQError):
                socket.bind(one)
                return socket
        socket.bind(last)
    return socket


def port_range(endpoint: str) -> list[str]:
    """The endpoints of tcp://HOST:FIRST-LAST; of any other just that one."""
    host, _, ports = endpoint.rpartition(":")
    first, dash, last = ports.partition("-")
    if not (endpoint.startswith("tcp://") and dash):
        return [endpoint]
    return [f"{host}:{port}" for port in range(int(first), int(last) + 1)]


def _require_port(endpoint: str) -> None:
    """Raise `ConfigError` for what is no endpoint, and for a name that has no port."""
    host, port = host_of(endpoint), endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and (bracketed := with_brackets(host)) != host:
        raise ConfigError(
            f"cannot connect to {endpoint}: an IPv6 address needs brackets: tcp://{bracketed}:{port}"
        )
    has_port = (
        "://" in endpoint and host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    )
    if not (has_port or is_numeric(endpoint)):
        raise ConfigError(f"cannot connect to {endpoint}: it is not tcp://HOST:PORT")


@contextlib.contextmanager
def _closed_on_error(socket: Socket, what: str, endpoint: str) -> Iterator[None]:
    """Close the socket when the block fails; what ZeroMQ refuses is a `ConfigError`."""
    try:
        yield
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"{what}: {zmq.strerror(error.errno or 0)}", endpoint=endpoint) from error
    except LocalError:
        socket.close(linger=0)
        raise
