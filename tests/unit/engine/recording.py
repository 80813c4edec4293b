"""A connection without an agent that keeps its requests; the test gives the answers."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from kvbus.engine import Connection, Fetch, Offer, Runner
from kvbus.engine.fetches import Fetches, FetchRequest
from kvbus.engine.messages import offer_message
from kvbus.engine.offers import OfferRequest, Offers
from kvbus.errors import AgentHungUp, ErrorCode, KVBusError, PeerLost, RequestRefused
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, state_group
from kvbus.memory.attach import AgentLife
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
PATIENCE_S = 30.0


class RecordedLife(AgentLife):
    def end(self) -> None:
        self._end()


class Recording(Connection):
    """``reply`` answers each request at once, but a fetch if it is `ANSWER`; None leaves all so."""

    def __init__(self, reply: Message | None = ANSWER) -> None:
        super().__init__("/nowhere", SPEC.engine_id)
        self.life: RecordedLife = RecordedLife()
        self.reply = reply
        self.sent: list[Any] = []
        self.on_replies: list[Callable[[Any], None]] = []
        self._unanswered: set[int] = set()

    def send(
        self, message: Request[Any], on_reply: Callable[[Any], None], *, timeout_s: float = 0.0
    ) -> None:
        if self.lost is not None:
            raise self.lost
        number = len(self.sent)

        def answer(reply: Any) -> None:
            self._unanswered.discard(number)
            on_reply(reply)

        self.sent.append(message)
        self.on_replies.append(answer)
        self._unanswered.add(number)
        goes_on = isinstance(message, StartFetch) and self.reply is ANSWER
        if self.reply is not None and not goes_on:
            answer(MADE if message.reply is OfferMade else self.reply)

    def lose(self, error: KVBusError) -> None:
        """It ends: what has no answer fails first, as that of a real one does."""
        self.lost = error
        for number in sorted(self._unanswered):
            self.on_replies[number](error)
        if isinstance(error, PeerLost) and not isinstance(error, AgentHungUp):
            self.life.end()
        self.events.on_lost(error)

    def answer(self, fetched: Fetched) -> None:
        for message, on_reply in zip(self.sent, self.on_replies, strict=True):
            if isinstance(message, StartFetch) and message.fetch_id == fetched.fetch_id:
                on_reply(fetched)

    def notice(self, message: Message) -> None:
        self.events.on_notice(Notice(message.op, 1, "boot", to_body(message)))


def runner() -> Runner:
    """The one of the loop that runs, or of none."""
    made = Runner()
    try:
        made.begin(asyncio.get_running_loop())
    except RuntimeError:
        return made
    return made


class RecordedFetches(Fetches):
    """The fetches of an engine with the agent of ``connection``."""

    def __init__(
        self, connection: Recording | None = None, *, has_remote_ranks: bool = False, **options: Any
    ) -> None:
        super().__init__(
            runner(),
            SPEC,
            has_remote_ranks=has_remote_ranks,
            request_timeout_s=PATIENCE_S,
            logger=logging.getLogger("kvbus.engine"),
            **options,
        )
        self.state_of: WeakKeyDictionary[Fetch, FetchRequest] = WeakKeyDictionary()
        if connection is not None:
            self.opened(connection)

    def fetch(self, **asked: Any) -> Fetch:
        state = self.new(**{"ticket": {}, "num_tokens": 0, "block_ids": {}, **asked})
        fetch = Fetch(self, state)
        self.state_of[fetch] = state
        self.submit(state)
        return fetch


class RecordedOffers(Offers):
    """The offers of an engine with the agent of ``connection``."""

    def __init__(self, connection: Recording | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.state_of: WeakKeyDictionary[Offer, OfferRequest] = WeakKeyDictionary()
        if connection is not None:
            self.opened(connection)

    def offer(self, num_tokens: int = 0, block_ids: Any = None, **asked: Any) -> Offer:
        message = offer_message("r", num_tokens, block_ids or {}, **asked)
        assert message.sent_s is not None
        state = OfferRequest(runner(), message, message.sent_s + PATIENCE_S)
        offer = Offer(runner(), self, state)
        self.state_of[offer] = state
        self.submit(state)
        return offer


def completed(fetch_id: str) -> Fetched:
    return Fetched(fetch_id, "r", Outcome.COMPLETED, "completed", True)


def failed(fetch_id: str, *, blocks_free: bool) -> Fetched:
    return Fetched(fetch_id, "r", Outcome.FAILED, "reading", blocks_free, "timeout", "too late")


def busy(**detail: float) -> RequestRefused:
    return RequestRefused("full", code=ErrorCode.BUSY, **detail)


def draining() -> RequestRefused:
    return RequestRefused("the agent ends", code=ErrorCode.DRAINING)
