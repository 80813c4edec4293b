"""Events and commands that the tables of both agents have.

Refuses behaviour: these are values. ``reply_to`` is whatever the agent uses to answer the request
that caused an event.
"""

from dataclasses import dataclass
from typing import Any

from kvbus.errors import KVBusError
from kvbus.protocol.message import Message


@dataclass(frozen=True, slots=True)
class EngineLost:
    """A local engine is gone: what it asked for ends, and nobody is there to be told."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Nothing new from now on."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The agent ends now, and everything with it."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Time went by; what was due is due."""


@dataclass(frozen=True, slots=True)
class SendReply:
    """Answer the request with ``ok`` and this body."""

    reply_to: Any
    body: Message


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the request with this error."""

    reply_to: Any
    error: KVBusError
