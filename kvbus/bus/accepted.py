"""One accepted TCP connection of a bound ZeroMQ socket, seen from below: what the kernel counts.

Refuses descriptors that are no TCP connection, with `OSError`.
"""

import ipaddress
import os
import socket
import struct
from contextlib import suppress

# struct tcp_info of Linux has tcpi_bytes_acked and tcpi_bytes_received here since 4.1.
_COUNTS = struct.Struct("QQ")
_COUNTS_AT = 120
_INFO_BYTES = _COUNTS_AT + _COUNTS.size
# <linux/inet_diag.h>: a netlink header and a request for one socket, by its two ends and no cookie;
# the answer has the socket's owner and inode behind its header, state, ends and counters. A socket
# that was closed has no inode, and its owner reads as 0, which is not root's then.
_NETLINK_SOCK_DIAG, _BY_FAMILY, _IS_REQUEST, _ANY = 4, 20, 1, 0xFFFFFFFF
_ASKED = struct.Struct("=LHHLL4BL")
_TYPE_AT, _OWNER_AT = 4, 80


class Accepted:
    """A connection whose descriptor is ZeroMQ's: it may be closed, and used again, at any time.

    So it is never closed here, and looked at again before it is shut down. What is asked of one
    that is gone raises `OSError`.
    """

    def __init__(self, fd: int, accepted_at: float) -> None:
        self.fd, self.accepted_at = fd, accepted_at
        self.ended = False
        self.num_received = self.num_acked = 0
        self._socket = socket.socket(fileno=fd)
        try:
            if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
                raise OSError(f"descriptor {fd} is no TCP connection")
            self._peer = self._socket.getpeername()
        except OSError:
            self.forget()
            raise
        self.address = counted_by(self._peer[0])

    def count(self) -> None:
        """Ask the kernel how many bytes came, and how many the peer has acknowledged."""
        found = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        self.num_acked, self.num_received = _COUNTS.unpack(found[_COUNTS_AT:])

    def end(self) -> None:
        """Have ZeroMQ see its end, and close it; nothing happens when it is gone."""
        self.ended = True
        with suppress(OSError):
            if self._socket.getpeername() == self._peer:
                self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Let go of the descriptor without closing it."""
        self._socket.detach()


def counted_by(host: str) -> str:
    """The address to count by: of IPv6 the network of 64 bits, which one host has to itself."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def is_of_same_user(fd: int) -> bool:
    """Whether a process of this user, or of root, is at the other end of a TCP connection.

    The kernel is asked for the socket there, so it is false for one of another machine or network
    namespace, and where the kernel does not tell.
    """
    try:
        return _owner_at_other_end(fd) in (0, os.geteuid())
    except OSError:
        return False


def _owner_at_other_end(fd: int) -> int | None:
    here = socket.socket(fileno=os.dup(fd))
    with here, socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        (host, port), (peer_host, peer_port) = here.getsockname()[:2], here.getpeername()[:2]
        ends = struct.pack("!HH", peer_port, port)
        ends += _in_16_bytes(here.family, peer_host) + _in_16_bytes(here.family, host)
        ends += struct.pack("=LLL", 0, _ANY, _ANY)
        num_bytes = _ASKED.size + len(ends)
        header = num_bytes, _BY_FAMILY, _IS_REQUEST, 0, 0
        kernel.send(_ASKED.pack(*header, here.family, socket.IPPROTO_TCP, 0, 0, _ANY) + ends)
        answer = kernel.recv(4096, socket.MSG_DONTWAIT)
    if struct.unpack_from("=H", answer, _TYPE_AT) != (_BY_FAMILY,):
        return None
    owner, inode = struct.unpack_from("=LL", answer, _OWNER_AT)
    return owner if inode else None


def _in_16_bytes(family: int, host: str) -> bytes:
    return socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0")
