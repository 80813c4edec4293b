"""Who is at the other end of a TCP connection of this machine: the kernel tells by netlink."""

import os
import socket
import struct

# <linux/inet_diag.h>: a netlink header and a request for one socket, by its two ends and no cookie;
# the answer has the socket's owner and inode behind its header, state, ends and counters. A socket
# that was closed has no inode, and its owner reads as 0, which is not root's then.
_NETLINK_SOCK_DIAG, _BY_FAMILY, _IS_REQUEST, _ANY = 4, 20, 1, 0xFFFFFFFF
_ASKED = struct.Struct("=LHHLL4BL")
_TYPE_AT, _OWNER_AT = 4, 80


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
