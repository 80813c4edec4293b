"""One peer of a request server: its calls in progress and its unacknowledged notices.

Refuses a second answer to a call, and a notice when too many are unacknowledged.
"""

from collections.abc import Callable
from typing import Protocol

from kvbus.bus.limits import ServerCounters, ServerLimits
from kvbus.bus.timers import Timers
from kvbus.errors import ClosedError, ErrorCode, KVBusError, LocalError
from kvbus.protocol.envelope import Body, Notice, encode_notice
from kvbus.protocol.message import error_body

_RESEND_WINDOW = 64
_MAX_BACKOFF = 8


class ServerView(Protocol):
    """What a session needs of its server."""

    boot: str
    timers: Timers
    limits: ServerLimits
    counters: ServerCounters
    resend_s: float

    def post(self, identity: bytes, frame: bytes) -> bool:
        """Send to the connection ``identity``; False when that cannot be done now."""
        ...


class Call:
    """One request to be answered exactly once, now or later, from the event loop's thread."""

    __slots__ = ("_answer", "answered", "body", "op", "request_id", "session")

    def __init__(
        self,
        session: "Session",
        request_id: int,
        op: str,
        body: Body,
        answer: Callable[["Call", Body | None, Body | None], None],
    ) -> None:
        self.session, self.request_id = session, request_id
        self.op, self.body = op, body
        self.answered = False
        self._answer = answer

    def reply(self, body: Body) -> None:
        """Answer ``ok``; a body that cannot be encoded becomes an error reply and a fault."""
        self._once()
        self._answer(self, body, None)

    def refuse(self, error: KVBusError) -> None:
        """Answer with the code, message and detail of ``error``."""
        self._once()
        self._answer(self, None, error_body(error))

    def _once(self) -> None:
        if self.answered:
            raise LocalError(f"call '{self.op}' was answered before", request_id=self.request_id)
        self.answered = True


class Session:
    """The peer with one boot id, over all the connections that it makes.

    Set ``pinned`` to keep it while idle; a session that was ever notified is kept anyway.
    """

    def __init__(self, line: ServerView, boot: str, identity: bytes) -> None:
        self.boot = boot
        self.identity = identity
        self.pinned = False
        self.closed = False
        self.pending: dict[int, Call] = {}
        self.evicted_upto = 0
        self._line = line
        self._last_seq = 0
        self._outbox: dict[int, bytes] = {}
        self._outbox_bytes = 0
        self._progress_at = 0.0
        self._backoff = 1
        self._armed = False

    @property
    def idle(self) -> bool:
        """True when nothing is lost by forgetting that this peer was ever here."""
        return not self.pinned and not self.pending and self._last_seq == 0

    @property
    def num_unacknowledged(self) -> int:
        """How many notices the peer has not acknowledged."""
        return len(self._outbox)

    def notify(self, op: str, body: Body) -> int:
        """Send a notice until the peer acknowledges it; returns its seq.

        Raises `ClosedError` on a forgotten session and `LocalError` with code ``busy`` when the
        peer has not acknowledged too many of them.
        """
        if self.closed:
            raise ClosedError("session was forgotten", boot=self.boot)
        frame = encode_notice(Notice(op, self._last_seq + 1, self._line.boot, body))
        self._require_room(len(frame))
        self._last_seq += 1
        if not self._outbox:
            self._progress_at = self._line.timers.now()
        self._outbox[self._last_seq] = frame
        self._outbox_bytes += len(frame)
        self._line.counters.notices += 1
        self._line.post(self.identity, frame)
        self._arm()
        return self._last_seq

    def acknowledge(self, upto: int) -> None:
        """The peer has all notices up to ``upto``; raises `LocalError` when they never were."""
        if upto > self._last_seq:
            raise LocalError("acknowledges notices that were never sent", last_seq=self._last_seq)
        for seq in list(self._outbox):
            if seq > upto:
                break
            self._outbox_bytes -= len(self._outbox.pop(seq))
        self._progress_at, self._backoff = self._line.timers.now(), 1

    def moved(self, identity: bytes) -> None:
        """The peer has a new connection; what the old one held is lost and is sent again."""
        self.identity = identity
        self._send_again()

    def close(self) -> None:
        """Forget the notices; calls still pending are answered into the void."""
        self.closed = True
        self._outbox.clear()
        self._outbox_bytes = 0

    def _require_room(self, num_bytes: int) -> None:
        limits = self._line.limits
        if (
            len(self._outbox) >= limits.max_notices
            or self._outbox_bytes + num_bytes > limits.max_notice_bytes
        ):
            raise LocalError(
                "peer has not acknowledged too many notices",
                code=ErrorCode.BUSY,
                boot=self.boot,
                unacknowledged=len(self._outbox),
            )

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._line.timers.at(self._resend_at(), self._on_timer)

    def _resend_at(self) -> float:
        return self._progress_at + self._line.resend_s * self._backoff

    def _on_timer(self, _: int) -> None:
        self._armed = False
        if not self._outbox:
            return
        if self._line.timers.now() >= self._resend_at():
            self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
            self._send_again()
        self._arm()

    def _send_again(self) -> None:
        self._progress_at = self._line.timers.now()
        for frame in list(self._outbox.values())[:_RESEND_WINDOW]:
            if not self._line.post(self.identity, frame):
                return
            self._line.counters.notices_resent += 1
