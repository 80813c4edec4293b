"""ZeroMQ sockets, with every option that kvbus relies on."""

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

# A frame slightly over the limit gets an error reply; one far over it ends the connection.
_OVER_BYTES = 64 * 1024
# ZeroMQ's own handshake needs this size; a topic has at most 64 characters.
_MAX_TOPIC_FRAME_BYTES = 1024
_HANDSHAKE_MS = 5_000
_LINGER_MS = 200
_RECONNECT_MS, _MAX_RECONNECT_MS = 50, 1_000
_KEEPALIVE_S = 5
# Messages queued for each peer, in each direction, before its connection must wait.
_MAX_UNREAD, _MAX_UNREAD_BYTES, _MAX_UNSENT = 1000, 128 * 1024, 1000
# An XPUB processes subscriptions inside any call until the queue is empty, so a stream of them
# would block that call. A short queue makes it wait for the I/O thread, which is slower. With
# CURVE, a queue of one never delivers.
_MAX_UNREAD_SUBSCRIPTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """``hwm`` counts messages for each peer and direction."""

    hwm: int = 10_000
    curve: ServerCurve | ClientCurve | None = None
    allowed: AllowedPeers | None = None


class Probe:
    """Attempt to connect: a port without a listener refuses."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = tcp.socket(_family(host), tcp.SOCK_STREAM)
        self._socket.setblocking(False)
        self._begun = self._socket.connect_ex((host, port))

    def end(self) -> bool:
        with self._socket as ended:
            by_now = ended.getsockopt(tcp.SOL_SOCKET, tcp.SO_ERROR)
        return errno.ECONNREFUSED in (self._begun, by_now)


class BusContext(zmq.Context[Any]):
    def probe(self, host: str, port: int) -> Probe:
        return Probe(host, port)

    def is_here(self, host: str) -> bool:
        with tcp.socket(_family(host), tcp.SOCK_DGRAM) as one:
            try:
                one.bind((host, 0))
            except OSError:
                return False
        return True


def _family(host: str) -> tcp.AddressFamily:
    return tcp.AF_INET6 if ":" in host else tcp.AF_INET


def new_context() -> BusContext:
    """Leaving the ``with`` block flushes closed sockets for up to 0.2 s."""
    return BusContext()


def max_request_bytes(endpoint: str) -> int:
    """Return less over TCP, where strangers may send."""
    return MAX_PEER_REQUEST_BYTES if endpoint.startswith("tcp://") else MAX_FRAME_BYTES


def max_request_items(endpoint: str) -> int:
    return MAX_PEER_ITEMS if endpoint.startswith("tcp://") else MAX_ITEMS


def open_router(context: BusContext, endpoint: str, options: SocketOptions) -> Socket:
    """Report unroutable peers instead of dropping."""
    socket = _open(context, zmq.ROUTER, options)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.MAXMSGSIZE, max_request_bytes(endpoint) + _OVER_BYTES)
    if endpoint.startswith("tcp://"):
        socket.set(zmq.RCVHWM, _MAX_UNREAD)
        socket.set(zmq.SNDHWM, _MAX_UNSENT)
        socket.set(zmq.RCVBUF, _MAX_UNREAD_BYTES)
    return _bind(socket, endpoint)


def open_dealer(context: BusContext, endpoint: str, options: SocketOptions) -> Socket:
    """Return a DEALER that queues only to an established connection.

    Over ipc it also queues before, and never reconnects, which keeps its last messages.
    """
    _require_port(endpoint)
    socket = _open(context, zmq.DEALER, options)
    socket.set(zmq.IMMEDIATE, int(endpoint.startswith("tcp://")))
    return socket


def open_publisher(context: BusContext, endpoint: str, options: SocketOptions) -> Socket:
    """Return an XPUB; a topic costs ZeroMQ about 50 times its bytes of memory."""
    socket = _open(context, zmq.XPUB, options)
    socket.set(zmq.XPUB_VERBOSE, 1)
    socket.set(zmq.MAXMSGSIZE, _MAX_TOPIC_FRAME_BYTES)
    socket.set(zmq.RCVHWM, _MAX_UNREAD_SUBSCRIPTIONS)
    return _bind(socket, endpoint)


def open_subscriber(
    context: BusContext, endpoint: str, topics: frozenset[str], options: SocketOptions
) -> Socket:
    """Return a SUB of ``topics``; none means all."""
    _require_port(endpoint)
    socket = _open(context, zmq.SUB, options)
    for topic in topics or ("",):
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
    return socket


def key_of(frame: zmq.Frame | None) -> str:
    """Return the ``User-Id`` of a `ZapHandler`; clients choose the routing id."""
    return str(frame["User-Id"]) if frame is not None else ""


def descriptor_of(frame: zmq.Frame) -> int | None:
    """Return None if ZeroMQ made the frame itself."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def has_hung_up(frame: zmq.Frame | None) -> bool:
    """Return whether the connection, or one that reuses its descriptor, has ended."""
    fd = descriptor_of(frame) if frame is not None else None
    if fd is None:
        return False
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    return bool(poller.poll(0))


def connect(socket: Socket, endpoint: str, allowed: AllowedPeers | None = None) -> None:
    """On failure close the socket and raise `LocalError`."""
    with _closed_on_error(socket, f"cannot connect to {endpoint}", endpoint):
        if allowed is not None:
            allowed.check(endpoint)
        socket.set(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)


def is_numeric(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://"):
        return "://" in endpoint
    try:
        ipaddress.ip_address(host_of(endpoint).strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def with_brackets(host: str) -> str:
    try:
        is_bare = ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        return host
    return f"[{host}]" if is_bare else host


def bound_endpoint(socket: Socket) -> str:
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    return bytes(endpoint).rstrip(b"\0").decode()


def _open(context: BusContext, kind: int, options: SocketOptions) -> Socket:
    try:
        socket: Socket = context.socket(kind)
    except zmq.ZMQError as error:  # out of descriptors
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


# ZeroMQ's own heartbeats are not used. Their timer keeps running after a connection fails that was
# not being read because its queue was full. libzmq 4.3.5 then aborts the process ("!_io_error"). A
# peer could cause this: send requests, read no replies, and disconnect.
def _keep_alive(socket: Socket) -> None:
    """Let TCP detect a silent peer after four times `_KEEPALIVE_S`."""
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.set(zmq.TCP_MAXRT, 4 * 1000 * _KEEPALIVE_S)


def _bind(socket: Socket, endpoint: str) -> Socket:
    """For tcp://HOST:FIRST-LAST, bind to the first free port."""
    with _closed_on_error(socket, f"cannot bind {endpoint}", endpoint):
        # For "*" ZeroMQ opens one socket for IPv6 and IPv4, or for IPv4 only without IPv6.
        socket.set(zmq.IPV6, "[" in endpoint or host_of(endpoint) == "*")
        *others, last = port_range(endpoint)
        for one in others:
            with contextlib.suppress(zmq.ZMQError):
                socket.bind(one)
                return socket
        socket.bind(last)
    return socket


def port_range(endpoint: str) -> list[str]:
    host, _, ports = endpoint.rpartition(":")
    first, dash, last = ports.partition("-")
    if not (endpoint.startswith("tcp://") and dash):
        return [endpoint]
    return [f"{host}:{port}" for port in range(int(first), int(last) + 1)]


def _require_port(endpoint: str) -> None:
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
    try:
        yield
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"{what}: {zmq.strerror(error.errno or 0)}", endpoint=endpoint) from error
    except LocalError:
        socket.close(linger=0)
        raise
