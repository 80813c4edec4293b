"""Hosts of a network that a test makes for itself: network namespaces, joined pair by pair.

Needs root and iproute2; `HAVE_NAMESPACES` says whether they are there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

IP = shutil.which("ip")
HAVE_NAMESPACES = IP is not None and os.geteuid() == 0
WITHIN_S = 20.0
EVERYWHERE = tuple(psutil.net_if_addrs())
"""All interfaces of this machine, for a transport that nobody has restricted."""

_CONNECT = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=1).close()
    except OSError:
        continue
    print(port)
"""


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str

    @property
    def command(self) -> tuple[str, ...]:
        """What runs the rest of a command line on this host."""
        return (str(IP), "netns", "exec", self.name)

    def ports_open_at(self, address: str, ports: list[int]) -> list[int]:
        """Which of the ports take a connection from here."""
        answer = subprocess.run(
            [*self.command, sys.executable, "-c", _CONNECT, address, *map(str, ports)],
            capture_output=True,
            text=True,
            check=True,
            timeout=WITHIN_S + 2 * len(ports),
        )
        return [int(port) for port in answer.stdout.split()]


@contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """Namespaces with loopback up; `link` joins two of them."""
    made = {name: Host(f"kvbus-{os.getpid()}-{name}") for name in names}
    with ExitStack() as stack:
        for host in made.values():
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield made


def link(interface: str, **ends: tuple[Host, str]) -> None:
    """Join two hosts by ``interface``, of this name on both; each end with its ADDRESS/BITS."""
    (one, one_address), (other, other_address) = ends.values()
    _ip(
        *("-n", one.name, "link", "add", interface, "type", "veth"),
        *("peer", "name", interface, "netns", other.name),
    )
    for host, address in ((one, one_address), (other, other_address)):
        _ip("-n", host.name, "address", "add", address, "dev", interface)
        _ip("-n", host.name, "link", "set", interface, "up")


def _ip(*arguments: str) -> None:
    subprocess.run([str(IP), *arguments], check=True, capture_output=True, timeout=WITHIN_S)
