"""One request that waits for its reply."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbus.errors import KVBusError
from kvbus.protocol.message import R, Request

OnReply = Callable[[R | KVBusError], None]


@dataclass(slots=True, eq=False)
class Pending:
    """A request, where its reply goes, and until when it is sent again."""

    message: Request[Any]
    frame: bytes
    on_reply: OnReply[Any]
    timeout_s: float
    deadline: float
    interval_s: float
    on_sent: Callable[[], None] | None = None
    """Called when a connection takes it for the first time."""
