"""A plain TCP connection that speaks ZMTP as far as an attack needs, and a look at the attacked.

Refuses to wait for ZeroMQ: bytes go out as they are made, whatever its own library would not send.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.agents import WITHIN_S, AgentProcess

FORGED = "0123456789abcdef0123456789abcdef"
"""As long as a right, and none."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4
STUCK_S = 3.0
"""Nobody reads a connection any more that takes nothing for so long."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """One ZMTP frame."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


def connected(endpoint: str, kind: str) -> socket.socket:
    """A connection past the handshake of a ``kind`` of socket; tries until it is let in."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            return _try_to_connect(endpoint, kind)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _try_to_connect(endpoint: str, kind: str) -> socket.socket:
    wire = socket.create_connection(address_of(endpoint), timeout=STUCK_S)
    try:
        _shake_hands(wire, kind)
    except OSError:
        wire.close()
        raise
    return wire


def address_of(endpoint: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _shake_hands(wire: socket.socket, kind: str) -> None:
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind.encode()
    wire.sendall(GREETING)
    wire.sendall(frame(ready, COMMAND))
    _receive(wire, len(GREETING))
    _receive(wire, _receive(wire, 2)[1])


def _receive(wire: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        if not (more := wire.recv(num_bytes - len(received))):
            raise ConnectionError("cut off")
        received += more
    return received


@contextmanager
def bounded_growth(agent: AgentProcess, *, most_bytes: int) -> Iterator[None]:
    """Fail if the agent ever had so much more resident memory meanwhile."""
    status, limit = Path(f"/proc/{agent.pid}/status"), Path(f"/proc/{agent.pid}/clear_refs")

    def resident_bytes(name: str) -> int:
        (line,) = [line for line in status.read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) * 1024

    limit.write_text("5")  # the kernel notes the most from now on
    before = resident_bytes("VmRSS")
    yield
    assert resident_bytes("VmHWM") - before < most_bytes
