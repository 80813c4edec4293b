"""One accepted TCP connection of a bound ZeroMQ socket, seen from below: what the kernel counts.

Refuses descriptors that are no TCP connection, with `OSError`.
"""

import ipaddress
import socket
import struct
from contextlib import suppress

# struct tcp_info of Linux has tcpi_bytes_acked and tcpi_bytes_received here since 4.1.
_COUNTS = struct.Struct("QQ")
_COUNTS_AT = 120
_INFO_BYTES = _COUNTS_AT + _COUNTS.size


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
