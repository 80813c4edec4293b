"""One peer of a request server: its calls in progress and its unacknowledged notices.

Refuses a second answer to a call, and a notice when too many are unacknowledged.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbus.bus.limits import ServerCounters, ServerLimits
from kvbus.bus.pump import Pump
from kvbus.bus.sender import Sender
from kvbus.bus.timers import Timers
from kvbus.errors import ClosedError, ErrorCode, KVBusError, LocalError
from kvbus.protocol.envelope import Body, encode_notice
from kvbus.protocol.message import Message
from kvbus.table import Party

OnTold = Callable[[float], None]
"""Called with the time at which the peer says that it was told; not at all if it does not say."""

_RESEND_WINDOW = 64
_MAX_BACKOFF = 8


class ServerView(Protocol):
    """What sessions and calls need of their server."""

    boot: str
    timers: Timers
    limits: ServerLimits
    counters: ServerCounters
    resend_s: float
    pump: Pump

    def answer(self, call: "Call", outcome: Message | KVBusError) -> None:
        """Send the one reply to ``call``."""
        ...


class Call:
    """One request to be answered exactly once, now or later, from the event loop's thread.

    One that its server has ended (`end`) was answered; what its owner says then goes nowhere. An
    owner that wants to know of that sets ``on_end``.
    """

    __slots__ = (
        "_server", "answered", "fingerprint", "on_end", "op", "request_id", "session", "was_ended",
    )  # fmt: skip

    def __init__(
        self, server: ServerView, session: "Session", request_id: int, op: str, fingerprint: int
    ) -> None:
        self._server, self.session = server, session
        self.request_id, self.op, self.fingerprint = request_id, op, fingerprint
        self.answered = self.was_ended = False
        self.on_end: Callable[[], None] | None = None

    def reply(self, message: Message) -> None:
        """Answer ``ok``; a message that cannot be encoded becomes an error reply and a fault."""
        self._server.answer(self, message)

    def refuse(self, error: KVBusError) -> None:
        """Answer with the code, message and detail of ``error``."""
        self._server.answer(self, error)

    def end(self, error: KVBusError) -> None:
        """Refuse it while its owner may still be at it."""
        self.refuse(error)
        self.was_ended = True
        if self.on_end is not None:
            self.on_end()


class Session:
    """One sender, over all the connections that it makes.

    Set ``pinned`` to keep it while idle; a session that was ever notified is kept anyway.
    """

    def __init__(self, server: ServerView, sender: Sender, identity: bytes) -> None:
        self.sender = sender
        self.boot, self.name = sender.boot, sender.name
        self.party: Party = sender.key or identity
        """Who pays for what it asks for: the key, or the connection by which it came first."""
        self.identity = identity
        self.pinned = False
        self.closed = False
        self.pending: dict[int, Call] = {}
        self.evicted_upto = 0
        self._server = server
        self._last_seq = 0
        self._outbox: dict[int, tuple[bytes, OnTold | None]] = {}
        self._outbox_bytes = 0
        self._progress_at = 0.0
        self._backoff = 1
        self._armed = False

    @property
    def idle(self) -> bool:
        """True when nothing is lost by forgetting that this peer was ever here."""
        return not self.pending and not self.must_stay

    @property
    def must_stay(self) -> bool:
        """Whether somebody relies on it, or the peer does on its notices."""
        return self.pinned or self._last_seq > 0

    @property
    def num_unacknowledged(self) -> int:
        """How many notices the peer has not acknowledged."""
        return len(self._outbox)

    def notify(self, op: str, body: Message | Body, on_told: OnTold | None = None) -> int:
        """Send a notice until the peer acknowledges it; returns its seq.

        Raises `ClosedError` on a forgotten session and `LocalError` with code ``busy`` when the
        peer has not acknowledged too many of them.
        """
        if self.closed:
            raise ClosedError("session was forgotten", boot=self.boot)
        frame = encode_notice(op, self._last_seq + 1, self._server.boot, body)
        self._require_room(len(frame))
        self._last_seq += 1
        if not self._outbox:
            self._progress_at = self._server.timers.now()
        self._outbox[self._last_seq] = frame, on_told
        self._outbox_bytes += len(frame)
        self._server.counters.notices += 1
        self._server.pump.send(self.identity, frame)
        self._arm()
        return self._last_seq

    def acknowledge(self, upto: int, told_s: Sequence[float] = ()) -> None:
        """The peer has all notices up to ``upto``, and was told of the last ones at ``told_s``.

        Raises `LocalError` when they never were.
        """
        if upto > self._last_seq:
            raise LocalError("acknowledges notices that were never sent", last_seq=self._last_seq)
        first_told = upto - len(told_s) + 1
        for seq in list(self._outbox):
            if seq > upto:
                break
            frame, on_told = self._outbox.pop(seq)
            self._outbox_bytes -= len(frame)
            if on_told is not None and seq >= first_told:
                on_told(told_s[seq - first_told])
        self._progress_at, self._backoff = self._server.timers.now(), 1

    def moved(self, identity: bytes) -> None:
        """The peer has a new connection; what the old one held is lost and is sent again."""
        self.identity = identity
        self._send_again()

    def end_calls(self, error: KVBusError) -> None:
        """Refuse all that it waits for."""
        for call in list(self.pending.values()):
            call.end(error)

    def close(self) -> None:
        """Forget the notices; calls still pending are answered into the void."""
        self.closed = True
        self._outbox.clear()
        self._outbox_bytes = 0

    def _require_room(self, num_bytes: int) -> None:
        limits = self._server.limits
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
            self._server.timers.at(self._resend_at(), self._on_timer)

    def _resend_at(self) -> float:
        return self._progress_at + self._server.resend_s * self._backoff

    def _on_timer(self, _: int) -> None:
        self._armed = False
        if not self._outbox:
            return
        if self._server.timers.now() >= self._resend_at():
            self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
            self._send_again()
        self._arm()

    def _send_again(self) -> None:
        self._progress_at = self._server.timers.now()
        for frame, _ in list(self._outbox.values())[:_RESEND_WINDOW]:
            if not self._server.pump.send(self.identity, frame):
                return
            self._server.counters.notices_resent += 1
