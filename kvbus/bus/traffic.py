"""What the owner of a bound socket has handed out and sent, by connection, for the guard.

Refuses to remember routing ids without end.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

import zmq

_MAX_IDENTITIES = 4096
# What ZMTP 3.1 puts before a frame, and CURVE around one: command, nonce, authenticator, flags.
_SHORT_BYTES, _SHORT_HEADER_BYTES, _LONG_HEADER_BYTES = 255, 2, 9
_SEAL_BYTES = 8 + 8 + 16 + 1


Watch = Callable[[zmq.Socket[bytes]], "Traffic"]
"""Called with a socket before it is bound; returns where its owner counts."""


class Traffic:
    """Counts by descriptor, which only ever grow: written by one thread and read by another.

    ``unwanted`` are connections to be ended for what they said.
    """

    def __init__(self, *, has_keys: bool = False) -> None:
        self._seal_bytes = _SEAL_BYTES if has_keys else 0
        self.num_delivered: Counter[int] = Counter()
        self.num_messages: Counter[int] = Counter()
        self.num_sent: Counter[int] = Counter()
        self.num_drains = 0
        self.unwanted: set[int] = set()
        self._descriptors: OrderedDict[bytes, int] = OrderedDict()

    def _wire_bytes(self, frame: bytes) -> int:
        num_bytes = len(frame) + self._seal_bytes
        return num_bytes + (_LONG_HEADER_BYTES if num_bytes > _SHORT_BYTES else _SHORT_HEADER_BYTES)

    def delivered(self, fd: int, num_bytes: int) -> None:
        """A message that came by this connection was handed out, with so many bytes on the wire."""
        self.num_delivered[fd] += num_bytes
        self.num_messages[fd] += 1

    def heard(self, last: zmq.Frame, frames: list[bytes]) -> None:
        """A ROUTER handed out a message; what goes to its sender goes to that connection."""
        fd = descriptor_of(last)
        if fd is None:
            return
        self.delivered(fd, sum(self._wire_bytes(frame) for frame in frames[1:]))
        if self._descriptors.get(frames[0]) != fd:
            self._descriptors[frames[0]] = fd
            if len(self._descriptors) > _MAX_IDENTITIES:
                self._descriptors.popitem(last=False)

    def sent(self, identity: bytes, num_bytes: int) -> None:
        """A ROUTER took a message for a sender that was heard."""
        fd = self._descriptors.get(identity)
        if fd is not None:
            self.num_sent[fd] += num_bytes


def descriptor_of(frame: zmq.Frame) -> int | None:
    """The connection that a frame came by; ZeroMQ does not say it of what it made up itself."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None
