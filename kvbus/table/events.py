"""Events and commands that the tables of both agents have: values without behaviour.

``reply_to`` is whatever the agent uses to answer the request that caused an event.
"""

from typing import Any

from kvbus.errors import KVBusError
from kvbus.protocol.message import Message, Redacted


class Value(Redacted, frozen=True):
    """An event or a command."""


class EngineLost(Value, frozen=True):
    """A local engine is gone: what it asked for ends, and there is no one to be told."""

    engine_id: str


class DrainStarted(Value, frozen=True):
    """Nothing new from now on."""


class Stopped(Value, frozen=True):
    """The agent ends now, and everything with it."""


class DeadlinePassed(Value, frozen=True):
    """Time went by; what was due is due."""


class SendReply(Value, frozen=True):
    """Answer the request with ``ok`` and this body."""

    reply_to: Any
    body: Message


class Refuse(Value, frozen=True):
    """Answer the request with this error."""

    reply_to: Any
    error: KVBusError
