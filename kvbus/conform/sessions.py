"""What an agent keeps of each process of the engine: its requests, its memory, its notices.

Refuses to judge: `PlayedAgent` and the scenes do.
"""

import mmap
import time
from dataclasses import dataclass, field
from typing import Any

from kvbus.conform.attach import Connection
from kvbus.protocol.engine import Register
from kvbus.protocol.envelope import Body, encode_notice
from kvbus.protocol.message import Message

REPEATS_S = (0.25, 0.5, 1.0, 2.0)
EARLIEST, LATEST, GRACE_S = 0.5, 2.0, 3.0
RESEND_S, RESEND_WINDOW = 0.25, 64


@dataclass(slots=True, eq=False)
class Asked:
    """One request, each time that it came, and the reply to it once there is one."""

    session: "Session"
    request_id: int
    op: str
    body: Message
    frame: bytes
    times: list[float] = field(default_factory=list)
    reply: bytes | None = None

    def bad_repeat(self) -> str:
        """Which repeat came too early or too late; empty when none did.

        A busy machine may hold up either side. So half of the time that all of them should take is
        not too early: of two that were held up the second one seems to follow at once.
        """
        least_s = 0.0
        for number in range(1, len(self.times)):
            pause_s = self.times[number] - self.times[number - 1]
            told_s = REPEATS_S[min(number, len(REPEATS_S)) - 1]
            least_s += EARLIEST * told_s
            is_early = self.times[number] - self.times[0] < least_s
            if is_early or pause_s > LATEST * told_s + GRACE_S:
                return f"repeat {number} of `{self.op}` after {pause_s:.2f} s, not {told_s:g} s"
        return ""


class Outbox:
    """Notices of one session, until they are acknowledged."""

    def __init__(self) -> None:
        self.frames: dict[int, bytes] = {}
        self.pending: set[int] = set()
        self.last_seq = 0
        self._arrived: set[int] = set()
        self._upto, self._sent_at = 0, 0.0

    def add(self, boot: str, op: str, body: Message | Body) -> int:
        """Write down the next notice; it is not sent yet."""
        self.last_seq += 1
        self.frames[self.last_seq] = encode_notice(op, self.last_seq, boot, body)
        self.pending.add(self.last_seq)
        return self.last_seq

    def sent(self, seq: int) -> bytes:
        """The frame of a notice that is sent now."""
        self._arrived.add(seq)
        while self._upto + 1 in self._arrived:
            self._upto += 1
            self._arrived.discard(self._upto)
        self._sent_at = time.monotonic()
        return self.frames[seq]

    @property
    def sent_upto(self) -> int:
        """Every notice up to this one was sent."""
        return self._upto

    def acknowledge(self, upto: int) -> None:
        """Forget those."""
        self.pending = {seq for seq in self.pending if seq > upto}

    def due(self) -> list[int]:
        """The notices that should be sent again now."""
        if time.monotonic() < self._sent_at + RESEND_S:
            return []
        return sorted(self.pending)[:RESEND_WINDOW]


@dataclass(slots=True, eq=False)
class Session:
    """One process of the engine, from its `hello` on."""

    boot: str
    connection: Connection
    identity: bytes = b""
    secret: str | None = None
    asked: dict[int, Asked] = field(default_factory=dict)
    last_id: int | None = None
    registered: Register | None = None
    segments: dict[str, mmap.mmap] = field(default_factory=dict)
    files: set[tuple[int, int]] = field(default_factory=set)
    unmapped: set[str] = field(default_factory=set)
    outbox: Outbox = field(default_factory=Outbox)

    @property
    def is_control(self) -> bool:
        """Whether this is the session that offers and fetches."""
        return self.registered is not None and self.registered.rank is None

    @property
    def gets_notices(self) -> bool:
        """Whether notices of the engine go to it."""
        return self.registered is not None and (self.is_control or self.registered.notices)


def reply_fields(asked: Asked, boot: str, **answer: Any) -> dict[str, Any]:
    """The envelope of a reply, with a field that no version has."""
    return {"v": 1, "re": asked.request_id, "boot": boot, "a_later_field": [1], **answer}
