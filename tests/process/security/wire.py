"""A plain TCP connection that speaks ZMTP, and sends bytes that libzmq would not."""

import socket
import time

from tests.support.agents import WITHIN_S

FORGED = "0123456789abcdef0123456789abcdef"
"""A forged right of valid length."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4
STUCK_S = 3.0
"""The peer of a connection that accepts nothing for this long has stopped reading."""


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


def connected(endpoint: str, kind: str) -> socket.socket:
    """Connect as a ``kind`` of socket; retry until the handshake is done."""
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
