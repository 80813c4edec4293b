"""Plain sockets for tests: what somebody who does not use kvbus can send, and what comes back.

Refuses to check anything: frames go out as they are given.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """The reply to one request of a plain DEALER; ``envelope`` replaces fields of the frame."""
    fields = {"v": 1, "op": op, "id": 1, "boot": uuid.uuid4().hex, "body": body, **envelope}
    return ask_frames(endpoint, msgpack.packb(fields), curve=curve)


def ask_frames(endpoint: str, *frames: bytes, curve: Curve | None = None) -> dict[str, Any]:
    """The reply to frames of a plain DEALER; they are sent again to an agent that is silent.

    Raises `zmq.Again` when none came within `REPLY_WITHIN_S`.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        apply(dealer, curve)
        dealer.connect(endpoint)
        for _ in range(NUM_TRIES):
            dealer.send_multipart(frames)
            if dealer.poll(round(REPLY_WITHIN_S / NUM_TRIES * 1000)):
                break
        reply: dict[str, Any] = msgpack.unpackb(dealer.recv(zmq.NOBLOCK))
        return reply


def apply(socket: "zmq.Socket[bytes]", curve: Curve | None) -> None:
    """Give a socket its keys, before it connects."""
    if curve is not None:
        socket.set(zmq.CURVE_PUBLICKEY, curve.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())
        socket.set(zmq.CURVE_SERVERKEY, curve.server.encode())
