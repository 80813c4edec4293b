"""Peer authentication: CURVE keys (40 characters of Z85), ZAP checks, addresses and UIDs."""

import asyncio
import ipaddress
import os
import socket as tcp
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from kvbus.bus.actor import SocketActor
from kvbus.bus.pump import Pump, Socket
from kvbus.errors import ConfigError, ErrorCode, LocalError

KEY_CHARS, KEY_BYTES = 40, 32
HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerCurve:
    keys: KeyPair
    domain: str

    def apply(self, socket: Socket) -> None:
        """Set the options; without a `ZapHandler`, every client is rejected."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        socket.set(zmq.ZAP_DOMAIN, self.domain.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))


@dataclass(frozen=True, slots=True)
class ClientCurve:
    """Keys of a connecting socket."""

    keys: KeyPair
    server_key: str

    def apply(self, socket: Socket) -> None:
        require_key(self.server_key)
        socket.set(zmq.CURVE_SERVERKEY, self.server_key.encode())
        socket.set(zmq.CURVE_PUBLICKEY, self.keys.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        socket.set(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))


def new_key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def key_pair_of(secret: str) -> KeyPair:
    require_key(secret)
    return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)


def require_key(text: str) -> None:
    """Raise `ConfigError`, without the text."""
    try:
        is_key = len(text) == KEY_CHARS and len(z85.decode(text.encode("ascii"))) == KEY_BYTES
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ConfigError("not a key: a character is not of Z85") from error
    if not is_key:
        raise ConfigError(f"not a key: it has {len(text)} characters in place of {KEY_CHARS}")


ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION, _CURVE = b"1.0", b"CURVE"
_LET_IN, _REFUSED = b"200", b"400"
_NUM_FRAMES = 9


@dataclass(frozen=True, slots=True)
class ZapRequest:
    key: str
    address: str
    domain: str


class ZapHandler(SocketActor):
    """ZAP handler that calls ``admit`` for each handshake. Create it before the sockets bind.

    The admitted key becomes the ``User-Id`` of all messages. A rejected client does not retry.
    """

    def __init__(
        self, context: zmq.Context[Any], admit: Callable[[ZapRequest], Awaitable[bool]]
    ) -> None:
        super().__init__()
        self._admit = admit
        self._answering = set[asyncio.Task[None]]()
        socket: Socket = context.socket(zmq.ROUTER)  # a REP must answer one request before the next
        socket.set(zmq.LINGER, 0)
        socket.bind(ZAP_ENDPOINT)
        self._pump = Pump(socket, on_frames=self._on_frames, on_failure=self._fail)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pump.start(loop)

    def _close(self) -> None:
        for task in self._answering:
            task.cancel()
        self._pump.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(frames))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, frames: list[bytes]) -> None:
        """Answer libzmq, RFC 27: version, request, domain, address, identity, mechanism, key."""
        sender, delimiter, _, request, *details = frames
        try:
            key = ""
            if len(frames) == _NUM_FRAMES and details[3] == _CURVE:
                key = z85.encode(details[4]).decode()
                applicant = ZapRequest(key, address=details[1].decode(), domain=details[0].decode())
                key = key if await self._admit(applicant) else ""
            code = _LET_IN if key else _REFUSED
            self._pump.send(sender, delimiter, _VERSION, request, code, b"", key.encode(), b"")
        except Exception as error:  # a kvbus bug: no client could connect any more
            self._fail(error)


class AllowedPeers:
    """Networks, with any port, one port, or a range: ``[fd00::/8]:7000-7999``."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._allowed = [_parse(entry) for entry in entries]

    def check(self, endpoint: str) -> None:
        """Raise `LocalError` (``forbidden``)."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
        plain = getattr(address, "ipv4_mapped", None) or address
        if not any(plain in network and int(port) in ports for network, ports in self._allowed):
            raise LocalError(
                f"{endpoint} is not in 'allowed_peers'",
                code=ErrorCode.FORBIDDEN,
                endpoint=endpoint,
            )


def _parse(entry: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, range]:
    host, ports = entry, ""
    if entry.startswith("["):
        host, _, ports = entry[1:].partition("]")
        ports = ports.removeprefix(":")
    elif entry.count(":") == 1:
        host, _, ports = entry.partition(":")
    first, dash, last = ports.partition("-")
    try:
        network = ipaddress.ip_network(host, strict=False)
        allowed = range(int(first), int(last if dash else first) + 1) if ports else range(1, 65_536)
    except ValueError as error:
        raise ConfigError(
            f"key 'allowed_peers': '{entry}' is not ADDRESS[/BITS][:PORT[-PORT]]; "
            f"in brackets when it is IPv6 with ports: {error}",
            key="allowed_peers",
        ) from error
    return network, allowed


# <linux/inet_diag.h>: a netlink header and a request for one socket, by its two ends and without a
# cookie. In the reply, the owner and inode follow the header, state, ends and counters. A closed
# socket has no inode; its owner reads as 0, which does not mean root.
_NETLINK_SOCK_DIAG, _BY_FAMILY, _IS_REQUEST, _ANY = 4, 20, 1, 0xFFFFFFFF
_QUERY = struct.Struct("=LHHLL4BL")
_TYPE_AT, _OWNER_AT = 4, 80


def is_of_same_user(fd: int) -> bool:
    """Return whether this user or root owns the other end of a TCP connection.

    False in another network namespace.
    """
    try:
        return _owner_at_other_end(fd) in (0, os.geteuid())
    except OSError:
        return False


def _owner_at_other_end(fd: int) -> int | None:
    here = tcp.socket(fileno=os.dup(fd))
    with here, tcp.socket(tcp.AF_NETLINK, tcp.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        (host, port), (peer_host, peer_port) = here.getsockname()[:2], here.getpeername()[:2]
        ends = struct.pack("!HH", peer_port, port)
        for one in (peer_host, host):
            ends += tcp.inet_pton(here.family, one.partition("%")[0]).ljust(16, b"\0")
        ends += struct.pack("=LLL", 0, _ANY, _ANY)
        header = _QUERY.size + len(ends), _BY_FAMILY, _IS_REQUEST, 0, 0
        kernel.send(_QUERY.pack(*header, here.family, tcp.IPPROTO_TCP, 0, 0, _ANY) + ends)
        answer = kernel.recv(4096, tcp.MSG_DONTWAIT)
    if struct.unpack_from("=H", answer, _TYPE_AT) != (_BY_FAMILY,):
        return None
    owner, inode = struct.unpack_from("=LL", answer, _OWNER_AT)
    return owner if inode else None
