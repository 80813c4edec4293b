"""A network between this machine and a host of its own, which delays, loses or swallows packets.

The kernel may have no netem: packets go through a thread of the test, over two TUN devices. Needs
root, iproute2 and /dev/net/tun; `HAVE_LINKS` says whether they are there.
"""

import fcntl
import heapq
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.namespaces import HAVE_NAMESPACES, Host, hosts, run_ip

TUN = Path("/dev/net/tun")
HAVE_LINKS = HAVE_NAMESPACES and TUN.exists()
NUM_NETS = 250


def own_net() -> str:
    """A network that no other process of this machine takes, until this one ends.

    Who has it has a name that the kernel gives to one socket only.
    """
    for number in range(NUM_NETS):
        taken = socket.socket(socket.AF_UNIX)
        try:
            taken.bind(f"\0kvbus-link-{number}")
        except OSError:
            taken.close()
            continue
        taken.detach()
        return f"10.213.{number}"
    raise OSError("all networks for links are taken")


_NET = own_net()
HERE, THERE, BITS = f"{_NET}.1", f"{_NET}.2", 24
_SET_INTERFACE, _IS_TUN, _WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 1 << 16
IP_VERSION = 4
_FLAGS_AT, _SYN, _ACK = 13, 0x02, 0x10
_LOOK_S = 0.05


@dataclass
class FaultyLink:
    """The link to ``host``; change what it does at any time."""

    host: Host
    interface: str
    delay_s: float = 0.0
    loss: float = 0.0
    """Of the packets that come from there."""
    is_hole: bool = False
    """Whether it swallows everything, both ways, without a word."""
    hole_ports: frozenset[int] = frozenset()
    """TCP ports to and from which it swallows everything."""
    lets_there_connect: bool = True
    """Whether it lets the host begin a TCP connection."""
    num_connects_from_there: int = 0
    """Packets of the host that would have begun one."""
    _ends: tuple[int, int] = (-1, -1)
    _random: Random = field(default_factory=lambda: Random(7))
    _under_way: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    _count: int = 0

    def carry(self) -> None:
        """Move packets until the end."""
        here, there = self._ends
        while not self.ended.is_set():
            due_s = self._under_way[0][0] - time.monotonic() if self._under_way else _LOOK_S
            ready, _, _ = select.select(self._ends, [], [], min(_LOOK_S, max(0.0, due_s)))
            for end in ready:
                self._take(end, to=there if end == here else here)
            self._deliver()

    def _take(self, end: int, *, to: int) -> None:
        with suppress(OSError):  # its device is down
            packet = os.read(end, _PACKET_BYTES)
            is_lost = end == self._ends[1] and self._is_lost(packet)
            if not (self.is_hole or is_lost or self.hole_ports & ports_of(packet)):
                self._count += 1
                due_at = time.monotonic() + (self.delay_s if to == self._ends[0] else 0.0)
                heapq.heappush(self._under_way, (due_at, self._count, to, packet))

    def _is_lost(self, packet: bytes) -> bool:
        """On its way back."""
        tcp = _tcp_of(packet)
        begins = bool(tcp) and tcp[_FLAGS_AT] & (_SYN | _ACK) == _SYN  # a TCP connection
        self.num_connects_from_there += begins
        return self._random.random() < self.loss or (begins and not self.lets_there_connect)

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(self._under_way)
            if not self.is_hole:
                with suppress(OSError):
                    os.write(to, packet)


def ports_of(packet: bytes) -> set[int]:
    """The TCP ports of an IPv4 packet; none of any other."""
    tcp = _tcp_of(packet)
    return set(struct.unpack_from("!HH", tcp)) if tcp else set()


def _tcp_of(packet: bytes) -> bytes:
    if packet[0] >> 4 != IP_VERSION or packet[9] != socket.IPPROTO_TCP:
        return b""
    return packet[(packet[0] & 0x0F) * 4 :]


@contextmanager
def faulty_link() -> Iterator[FaultyLink]:
    """A host, linked to this machine by ``interface``, of this name on both sides."""
    interface = f"kv{os.getpid() % 100_000}"
    with hosts("far") as made:
        host = made["far"]
        ends = _tun(f"{interface}a"), _tun(f"{interface}b")
        try:
            run_ip("link", "set", f"{interface}b", "netns", host.name)
            _give_address(HERE, f"{interface}a", interface)
            _give_address(THERE, f"{interface}b", interface, "-n", host.name)
            link = FaultyLink(host, interface, _ends=ends)
            carrier = threading.Thread(target=link.carry, daemon=True)
            carrier.start()
            try:
                yield link
            finally:
                link.ended.set()
                carrier.join()
        finally:
            for end in ends:
                os.close(end)  # ends the devices


def _give_address(address: str, device: str, name: str, *where: str) -> None:
    run_ip(*where, "link", "set", device, "name", name)
    run_ip(*where, "address", "add", f"{address}/{BITS}", "dev", name)
    run_ip(*where, "link", "set", name, "up")


def _tun(name: str) -> int:
    end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = _IS_TUN | _WITHOUT_HEADER
    fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), flags))
    return end
