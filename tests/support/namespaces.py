"""Hosts of a network that a test makes for itself: network namespaces, joined by a bridge.

Needs root and iproute2 (`HAVE_NAMESPACES`). Names contain the process id, so that a later run
removes namespaces of a killed one.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

IP, TC = shutil.which("ip"), shutil.which("tc")
HAVE_NAMESPACES = IP is not None and os.geteuid() == 0
WITHIN_S = 20.0
BRIDGED = "kv0"
"""The interface of a host on a bridge."""
MOST_BRIDGES = 7
NAMES, NAMES_BYTES = Path("/etc/netns"), 1024
HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IP, and TCP with time stamps."""

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
    """One namespace, its address on the bridge, and the name of the bridge's port."""

    name: str
    address: str
    port: str

    @property
    def command(self) -> tuple[str, ...]:
        return (str(IP), "netns", "exec", self.name)

    def run(self, *command: str, within_s: float = WITHIN_S) -> str:
        """Return the output of the command."""
        ended = subprocess.run(
            [*self.command, *command], capture_output=True, text=True, check=True, timeout=within_s
        )
        return ended.stdout

    def ports_open_at(self, address: str, ports: list[int]) -> list[int]:
        """The ports that accept a connection from here."""
        command = (sys.executable, "-c", _CONNECT, address, *map(str, ports))
        answer = self.run(*command, within_s=WITHIN_S + 2 * len(ports))
        return [int(port) for port in answer.split()]

    def received_bytes(self, interface: str) -> int:
        """Bytes received so far without headers, as a busy machine sends more packets."""
        lines = self.run("cat", "/proc/net/dev").splitlines()
        (line,) = [line for line in lines if line.strip().startswith(f"{interface}:")]
        num_bytes, num_packets = map(int, line.partition(":")[2].split()[:2])
        return num_bytes - HEADER_BYTES * num_packets

    def num_connects(self) -> int:
        """TCP connections that its processes have begun so far, the failed ones included."""
        lines = self.run("cat", "/proc/net/snmp").splitlines()
        names, values = (line.split() for line in lines if line[:4] == "Tcp:")
        return int(values[names.index("ActiveOpens")])

    def reset_connections(self, *, kept_ports: range) -> int:
        """End its TCP connections with other hosts, as a firewall does, and return their number.

        Connections of the kept ports stay. Returns 0 where the kernel cannot end any
        (CONFIG_INET_DIAG_DESTROY).
        """
        first, last = kept_ports[0], kept_ports[-1]
        kept = [f"{end} >= :{first} and {end} <= :{last}" for end in ("sport", "dport")]
        kept.append(f"dst {self.address}")
        other = f"not ( {' or '.join(kept)} )"
        return len(self.run("ss", "-KtnH", "state", "established", other).splitlines())

    def set_cable(self, state: str) -> None:
        _ip("link", "set", self.port, state)

    def set_path_mtu(self, mtu: int, *, told: bool = True) -> None:
        """Let packets of at most ``mtu`` bytes leave the host, and drop larger ones.

        If it is not ``told``, its own interface accepts them, as before a remote link.
        """
        _ip("link", "set", self.port, "mtu", str(mtu))
        segments = 65_535 if told else 1  # a packet that hardware would cut passes every limit
        _ip("-n", self.name, "link", "set", BRIDGED, "gso_max_segs", str(segments))

    def set_rate(self, mbit: int) -> None:
        limit = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
        self.run(str(TC), "qdisc", "replace", "dev", BRIDGED, "root", "tbf", *limit)

    def move(self, address: str) -> "Host":
        _ip("-n", self.name, "address", "del", f"{self.address}/24", "dev", BRIDGED)
        _ip("-n", self.name, "address", "add", f"{address}/24", "dev", BRIDGED)
        return replace(self, address=address)

    def set_names(self, names: Mapping[str, str]) -> None:
        """Set the addresses of host names for processes of this host.

        Processes that `command` started before the first call use the names of the machine.
        """
        folder = NAMES / self.name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} {name}" for name, address in names.items()]
        text = "\n".join(["127.0.0.1 localhost", *lines, ""]).encode()
        # In place, as the file is mounted; in one write, as a process may read it at any moment.
        file = os.open(folder / "hosts", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, text.ljust(NAMES_BYTES), 0)
        finally:
            os.close(file)

    def add_interface(self, name: str, address: str) -> None:
        end = f"{name}end"
        _ip("-n", self.name, "link", "add", name, "type", "veth", "peer", "name", end)
        _ip("-n", self.name, "address", "add", f"{address}/24", "dev", name)
        for one in (name, end):
            _ip("-n", self.name, "link", "set", one, "up")
        _wait_for_link(self, name)

    def set_interface(self, state: str) -> None:
        """Switch the host's own interface off and on, which takes its routes away as well."""
        _ip("-n", self.name, "link", "set", BRIDGED, state)


@contextmanager
def bridged(*names: str) -> Iterator[dict[str, Host]]:
    """Hosts on one Ethernet, each by its interface `BRIDGED`; this machine is on it as well.

    One process may have several networks.
    """
    _remove_left()
    pid, there = os.getpid(), list(psutil.net_if_addrs())
    # The ports of a namespace that was removed go a little later.
    mine = (f"{pid}b{n}" for n in range(MOST_BRIDGES))
    which = next(n for n, end in enumerate(mine) if not any(one.endswith(end) for one in there))
    net, bridge = f"10.{192 + 8 * which + (pid >> 8) % 8}.{pid % 256}", f"kvbr{pid}b{which}"
    made: dict[str, Host] = {}
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("address", "add", f"{net}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            port = f"kv{number}x{pid}b{which}"
            host = made[name] = Host(f"kvbus-{pid}b{which}-{name}", f"{net}.{number}", port)
            _ip("netns", "add", host.name)
            stack.callback(shutil.rmtree, NAMES / host.name, ignore_errors=True)
            stack.callback(_ip, "netns", "del", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip(
                *("-n", host.name, "link", "add", BRIDGED, "type", "veth"),
                *("peer", "name", host.port, "netns", str(pid)),
            )
            # A connection that still closes keeps the namespace, and with it the port, for minutes.
            stack.callback(_ip, "link", "del", host.port)
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", BRIDGED)
            _ip("link", "set", host.port, "master", bridge)
            host.set_interface("up")
            host.set_cable("up")
        for name in names:
            _wait_for_link(made[name], BRIDGED)
        yield made


def _wait_for_link(host: Host, interface: str) -> None:
    """Return once the interface is up, which UCX needs; it takes up to a second."""
    deadline = time.monotonic() + WITHIN_S
    while " state UP " not in _ip("-n", host.name, "link", "show", interface):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{interface} of {host.name} has no link")
        time.sleep(0.01)


def _remove_left() -> None:
    for line in _ip("netns", "list").splitlines():
        kind, _, rest = line.partition(" ")[0].partition("-")
        pid = rest.partition("b")[0]
        if kind == "kvbus" and pid.isdigit() and not psutil.pid_exists(int(pid)):
            with suppress(subprocess.CalledProcessError):  # another run removes it as well
                _ip("netns", "del", f"kvbus-{rest}")
            shutil.rmtree(NAMES / f"kvbus-{rest}", ignore_errors=True)
    for bridge in psutil.net_if_addrs():
        pid = bridge.removeprefix("kvbr").partition("b")[0]
        if bridge.startswith("kvbr") and pid.isdigit() and not psutil.pid_exists(int(pid)):
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", bridge)


def _ip(*arguments: str) -> str:
    ended = subprocess.run(
        [str(IP), *arguments], check=True, capture_output=True, text=True, timeout=WITHIN_S
    )
    return ended.stdout


def run_ip(*arguments: str) -> None:
    _ip(*arguments)
