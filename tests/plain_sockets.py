"""Plain sockets for tests: what somebody who does not use kvbus can send, and what comes back.

Refuses to check anything: frames go out as they are given.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import msgpack
import zmq

REPLY_WITHIN_S = 30.0


def ask(endpoint: str, op: str, body: Mapping[str, Any], **envelope: Any) -> dict[str, Any]:
    """The reply to one request of a plain DEALER; ``envelope`` replaces fields of the frame."""
    fields = {"v": 1, "op": op, "id": 1, "boot": uuid.uuid4().hex, "body": body, **envelope}
    return ask_frames(endpoint, msgpack.packb(fields))


def ask_frames(endpoint: str, *frames: bytes) -> dict[str, Any]:
    """The reply to any frames of a plain DEALER."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVTIMEO, round(REPLY_WITHIN_S * 1000))
        dealer.connect(endpoint)
        dealer.send_multipart(frames)
        reply: dict[str, Any] = msgpack.unpackb(dealer.recv())
        return reply
