"""Events and commands that the tables of both agents share.

``reply_to`` identifies the request to answer.
"""

from typing import Any

from kvbus.errors import KVBusError
from kvbus.protocol.message import Message, Redacted


class Value(Redacted, frozen=True):
    """An event or a command."""


class EngineLost(Value, frozen=True):
    """Its requests end, without a reply."""

    engine_id: str


class DrainStarted(Value, frozen=True):
    """New requests are refused from now on."""


class Stopped(Value, frozen=True):
    """The agent ends, with all entries."""


class DeadlinePassed(Value, frozen=True):
    """Deadlines up to now have passed."""


class SendReply(Value, frozen=True):
    reply_to: Any
    body: Message


class Refuse(Value, frozen=True):
    reply_to: Any
    error: KVBusError
