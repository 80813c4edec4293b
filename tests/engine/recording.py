"""Sessions that keep what they would send, for tests of what the SDK makes of its arguments.

Refuses to connect: what an agent says is given by the test.
"""

from collections.abc import Callable
from typing import Any

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, KVBusError, RequestRefused
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, state_group
from kvbus.protocol import (
    Empty,
    Fetched,
    Message,
    Notice,
    OfferMade,
    Outcome,
    Request,
    StartFetch,
    to_body,
)

FULL = GroupSpec("full", (0,), 16, 2, 8, "float16")
WINDOW = GroupSpec("window", (1,), 4, 2, 8, "float16", window=10)
STATE = state_group("state", (2,), (StatePart("conv", 4, 6), StatePart("norm", 1, 3)))
SPEC = EngineSpec("e", "m", 1, (FULL, WINDOW, STATE))
MADE, ANSWER = OfferMade("offer-1", {}), Empty()


class _Recording:
    """``reply`` answers each request at once, but a fetch if it is `ANSWER`; None leaves all so."""

    lost: KVBusError | None

    def __init__(self: Any, *args: Any, reply: Message | None = ANSWER, **kwargs: Any) -> None:
        super().__init__("/nowhere", SPEC, *args, **kwargs)  # type: ignore[call-arg] # a session's
        self.reply = reply
        self.sent: list[Any] = []
        self.on_replies: list[Callable[[Any], None]] = []

    def send(
        self,
        message: Request[Any],
        on_reply: Callable[[Any], None],
        *,
        timeout_s: float = 0.0,
    ) -> None:
        if self.lost is not None:
            raise self.lost
        self.sent.append(message)
        self.on_replies.append(on_reply)
        goes_on = isinstance(message, StartFetch) and self.reply is ANSWER
        if self.reply is not None and not goes_on:
            on_reply(MADE if message.reply is OfferMade else self.reply)

    def lose(self: Any, error: KVBusError) -> None:
        """The session ends."""
        self._lose(error)


class RecordingPrefill(_Recording, PrefillSession):
    """A prefill engine's session with nobody."""


class RecordingDecode(_Recording, DecodeSession):
    """A decode engine's session with nobody."""

    def answer(self, fetched: Fetched) -> None:
        """The agent says how a fetch has ended."""
        asked = zip(self.sent, self.on_replies, strict=True)
        for message, on_reply in asked:
            if isinstance(message, StartFetch) and message.fetch_id == fetched.fetch_id:
                on_reply(fetched)

    def notice(self, message: Message) -> None:
        """The agent says ``message``."""
        self._on_notice(Notice(message.op, 1, "boot", to_body(message)))


def failed(fetch_id: str, *, blocks_free: bool) -> Fetched:
    """The answer to a fetch that failed while it read."""
    return Fetched(fetch_id, "r", Outcome.FAILED, "reading", blocks_free, "timeout", "too late")


def busy(**detail: float) -> RequestRefused:
    return RequestRefused("full", code=ErrorCode.BUSY, **detail)
