from collections import deque
from collections.abc import Callable
from hashlib import blake2b

from kvbus.errors import KVBusError, LocalError
from kvbus.fair import Tenant
from kvbus.protocol.envelope import Body, encode_notice
from kvbus.protocol.message import Message

_MAX_LEFT = 8

# Identity of a request's sender: key, boot id, proof. Other processes can learn a boot id, but not
# the proof. A different proof with a known boot id is a different sender, with its own session:
#
#     with a secret     valid on any connection              proof: the secret
#     without, keys     any connection of the same key       proof: empty
#     without, no keys  this connection and no other         proof: its routing id
Sender = tuple[str, str, str | bytes]

Post = Callable[[bytes, "Session"], None]
OnAnswer = Callable[["Call", Message | KVBusError | None], None]
"""None drops the call."""


class Call:
    """Request to be answered exactly once, now or later, from the loop's thread."""

    __slots__ = ("_on_answer", "answered", "on_end", "op", "request_id", "session", "was_ended")

    def __init__(self, session: "Session", request_id: int, op: str, on_answer: OnAnswer) -> None:
        self.session, self.request_id, self.op = session, request_id, op
        self.answered = self.was_ended = False
        self.on_end: Callable[[], None] | None = None
        self._on_answer = on_answer

    def reply(self, message: Message) -> None:
        """Send an error if ``message`` cannot be encoded."""
        self._answer(message)

    def refuse(self, error: KVBusError) -> None:
        self._answer(error)

    def end(self, error: KVBusError | None) -> None:
        """Refuse or drop the call. Its owner may still be working on it."""
        self._answer(error)
        self.was_ended = True
        if self.on_end is not None:
            self.on_end()

    def _answer(self, outcome: Message | KVBusError | None) -> None:
        if self.was_ended:
            return
        if self.answered:
            raise LocalError(f"call '{self.op}' was answered before", request_id=self.request_id)
        self.answered = True
        self._on_answer(self, outcome)


class Session:
    """State of one sender, across its connections; a ``pinned`` one is kept while idle.

    ``on_unread`` is called when a message is lost because the peer's queue is full; the peer must
    not continue then.
    """

    def __init__(self, sender: Sender, identity: bytes, *, server_boot: str, post: Post) -> None:
        self.sender = sender
        self.key, self.boot, _ = sender
        self.name = blake2b(repr(sender).encode(), digest_size=16).hexdigest()
        self.tenant: Tenant = self.key or identity
        """Unit of fair shares."""
        self.identity = identity
        self.pinned = self.closed = False
        self.on_unread: Callable[[], None] | None = None
        self.pending: dict[int, Call] = {}
        self._server_boot, self._post, self._last_seq = server_boot, post, 0
        self._left: deque[bytes] = deque(maxlen=_MAX_LEFT)

    def notify(self, op: str, body: Message | Body) -> None:
        if self.closed:
            return
        self._last_seq += 1
        self._post(encode_notice(op, self._last_seq, self._server_boot, body), self)

    def on_queue_full(self) -> None:
        if self.on_unread is not None and not self.closed:
            self.on_unread()

    def moves_to(self, identity: bytes) -> bool:
        """Switch to the request's connection; return False for one that the sender has left."""
        if identity == self.identity:
            return True
        if identity in self._left:
            return False
        self._left.append(self.identity)
        self.identity = identity
        return True

    def end_calls(self, error: KVBusError | None) -> None:
        for call in list(self.pending.values()):
            call.end(error)

    def close(self, error: KVBusError | None = None) -> None:
        self.closed = True
        self.end_calls(error)
