"""Plain sockets for tests: they send any frame unchecked, and return the reply."""

import socket
import struct
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgpack
import zmq

REPLY_WITHIN_S = 30.0
NUM_TRIES = 6


@dataclass(frozen=True)
class Curve:
    """The keys of a plain socket: its own pair, and the server's public one."""

    public: str
    secret: str
    server: str


def ask(
    endpoint: str, op: str, body: Mapping[str, Any], *, curve: Curve | None = None, **envelope: Any
) -> dict[str, Any]:
    fields = {"v": 1, "op": op, "id": 1, "boot": uuid.uuid4().hex, "body": body, **envelope}
    return ask_frames(endpoint, msgpack.packb(fields), curve=curve)


def ask_frames(endpoint: str, *frames: bytes, curve: Curve | None = None) -> dict[str, Any]:
    """The reply to frames of a plain DEALER; they are sent again to an agent that is silent.

    Raises `zmq.Again` when none came within `REPLY_WITHIN_S`.
    """
    with plain_socket(endpoint, curve) as dealer:
        for _ in range(NUM_TRIES):
            dealer.send_multipart(frames)
            if dealer.poll(round(REPLY_WITHIN_S / NUM_TRIES * 1000)):
                break
        reply: dict[str, Any] = msgpack.unpackb(dealer.recv(zmq.NOBLOCK))
        return reply


@contextmanager
def plain_socket(
    endpoint: str, curve: Curve | None = None, *, kind: int = zmq.DEALER
) -> Iterator["zmq.Socket[bytes]"]:
    """A connected DEALER, or a SUB that gets every event."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVTIMEO, round(REPLY_WITHIN_S * 1000))
        socket.set(zmq.IPV6, "[" in endpoint)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        apply(socket, curve)
        socket.connect(endpoint)
        yield socket


def apply(socket: "zmq.Socket[bytes]", curve: Curve | None) -> None:
    if curve is not None:
        socket.set(zmq.CURVE_PUBLICKEY, curve.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())
        socket.set(zmq.CURVE_SERVERKEY, curve.server.encode())


def engine_socket(attach: Path) -> str:
    return f"ipc://{attach.with_name('engine.sock')}"


class Attached:
    """A connection to the attach socket of an agent, within ``with`` or until it is closed."""

    def __init__(self, attach: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(REPLY_WITHIN_S)
        self.socket.connect(str(attach))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, body: bytes, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [struct.pack("<I", len(body)) + body], fds)

    def receive(self) -> dict[str, Any]:
        """The next message of the agent; raises `EOFError` when it has hung up."""
        (length,) = struct.unpack("<I", self._exactly(4))
        answer: dict[str, Any] = msgpack.unpackb(self._exactly(length))
        return answer

    def ask(self, op: str, body: object, fds: tuple[int, ...] = ()) -> dict[str, Any]:
        self.send(msgpack.packb({"op": op, "body": body}), fds)
        return self.receive()

    def hello(self, **changes: object) -> dict[str, Any]:
        body = {"min_protocol": 1, "max_protocol": 1, "engine_id": "e", "boot": uuid.uuid4().hex}
        return self.ask("hello", {**body, **changes})

    def _exactly(self, num_bytes: int) -> bytes:
        read = b""
        while len(read) < num_bytes:
            chunk = self.socket.recv(num_bytes - len(read))
            if not chunk:
                raise EOFError
            read += chunk
        return read
