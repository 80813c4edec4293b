"""What happens to offers, and what the agent is told to do about it: values without behaviour.

A request is its own event: `Asked` carries its message as it came.
"""

from typing import Any, Generic, TypeVar

from kvbus.errors import ErrorCode
from kvbus.protocol.engine import EndedOffer, MakeOffer, Released
from kvbus.protocol.message import Message
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.tools import OfferEvent
from kvbus.protocol.word import Word
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
    Value,
)

M = TypeVar("M", bound=Message)


class Asked(Value, Generic[M], frozen=True):
    """A request about one offer or one name, which ``reply_to`` answers.

    A request of a local engine has its ``engine_id``. Any other has the CURVE key of its sender as
    ``holder``, empty without keys, and a ``fresh`` secret for what it may begin.
    """

    message: M
    reply_to: object
    engine_id: str = ""
    holder: str = ""
    fresh: str = ""


class Opened(Value, frozen=True):
    """The engine of ``ticket`` makes an offer; ``message`` was checked against its memory.

    ``ttl_s`` counts while no lease is live. The engine may name ``ticket_blocks`` of its blocks in
    the ticket itself. A reader of this machine may take the offer by its ``word``.
    """

    message: MakeOffer
    reply_to: object
    ticket: Ticket
    ttl_s: float
    ticket_blocks: int = 0
    word: Word | None = None


class Restored(Value, frozen=True):
    """An engine publishes an offer again that an earlier process of the agent has completed."""

    engine_id: str
    ended: EndedOffer


class WordTaken(Value, frozen=True):
    """A reader says that it has taken the offer by its word, or the table finds it so itself."""

    offer_id: str
    token: str = ""


class WordsRevoked(Value, frozen=True):
    """A reader that may write to the engine's words has lost the right to take its offers."""

    engine_id: str


class Abandoned(Value, frozen=True):
    """A reader that waited for the offer of this name waits no longer."""

    transfer_id: str
    reply_to: object


class EngineReady(Value, frozen=True):
    """An engine of the agent is ready to make offers."""


class EnginesGone(Value, frozen=True):
    """No engine of the agent is ready to make offers: the last one is lost, or none has come."""


Event = (
    Asked[Any]
    | Opened
    | Restored
    | WordTaken
    | WordsRevoked
    | Abandoned
    | EngineReady
    | EnginesGone
    | EngineLost
    | DrainStarted
    | Stopped
    | DeadlinePassed
)


class ReportReleased(Value, frozen=True):
    """Tell the engine that the offer's blocks are its own again, and subscribers, too."""

    engine_id: str
    released: Released
    num_tokens: int
    opened_at: float


class Publish(Value, frozen=True):
    """Tell subscribers; ``op`` is the event's name on the wire."""

    op: str
    body: OfferEvent


class BeginLease(Value, frozen=True):
    """A reader may read from now on: its connection set-up and its READs need progress."""

    offer_id: str
    epoch: int


class EndLease(Value, frozen=True):
    """The lease is over: ``reason`` is ended, expired or revoked; ``code`` is for its reader."""

    offer_id: str
    epoch: int
    reason: str
    code: ErrorCode


Command = SendReply | Refuse | ReportReleased | Publish | BeginLease | EndLease
Commands = list[Command]
