"""What the owner of a bound socket has handed out and sent, by connection, for the guard.

Refuses to remember routing ids without end.
"""

from collections import Counter, OrderedDict, deque
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
        self._identities: dict[int, bytes] = {}
        self._left: deque[int] = deque(maxlen=_MAX_IDENTITIES)
        self._gone: list[bytes] = []
        self._taken_over: Counter[int] = Counter()

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
            self._take_over(fd, frames[0])
            self._descriptors[frames[0]] = fd
            if len(self._descriptors) > _MAX_IDENTITIES:
                self._descriptors.popitem(last=False)

    def descriptor(self, identity: bytes) -> int | None:
        """The connection by which a sender was heard last."""
        return self._descriptors.get(identity)

    def left(self, fd: int) -> None:
        """The guard has seen that a connection is gone."""
        self._left.append(fd)

    def take_gone(self) -> list[bytes]:
        """The routing ids of connections that are gone since the last time, of those heard."""
        while self._left:
            fd = self._left.popleft()
            if self._taken_over[fd] > 0:
                self._taken_over[fd] -= 1
            elif (identity := self._identities.pop(fd, None)) is not None:
                self._gone.append(identity)
        gone, self._gone = self._gone, []
        return gone

    def _take_over(self, fd: int, identity: bytes) -> None:
        """A new connection is heard; the guard may yet tell of an older one of this descriptor."""
        before = self._identities.get(fd)
        if before is not None:
            self._taken_over[fd] += 1
            self._gone.append(before)
        self._identities[fd] = identity

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
