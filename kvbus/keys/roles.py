"""What the holder of each role may ask of agents, and whether it may hear events: the one table.

Refuses everything that is not in it, so that a new request is nobody's until it is put here.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from kvbus.protocol.message import Request
from kvbus.protocol.peer import DECODE_PEER_REQUESTS, PREFILL_PEER_REQUESTS, PeerWithdraw
from kvbus.protocol.status import Cost, Status
from kvbus.protocol.trace import Trace


class Role(StrEnum):
    """What a key is trusted as."""

    PREFILL = "prefill"
    """An agent that decode agents may connect to; it asks for the status and for traces only."""
    DECODE = "decode"
    """An agent that reads, and that others of its engine may connect to."""
    ROUTER = "router"
    """Withdraws offers by their tickets."""
    OBSERVER = "observer"
    """Asks for the status and for traces, and hears events."""


MAY_ASK: Mapping[Role, frozenset[type[Request[Any]]]] = MappingProxyType(
    {
        Role.PREFILL: frozenset((Status, Trace)),
        Role.DECODE: frozenset((*PREFILL_PEER_REQUESTS, *DECODE_PEER_REQUESTS)),
        Role.ROUTER: frozenset((PeerWithdraw, Status, Trace, Cost)),
        Role.OBSERVER: frozenset((Status, Trace, Cost)),
    }
)
MAY_HEAR_EVENTS = frozenset((Role.DECODE, Role.ROUTER, Role.OBSERVER))

_OPS = {role: frozenset(kind.op for kind in kinds) for role, kinds in MAY_ASK.items()}


def may_ask(roles: Iterable[Role], op: str) -> bool:
    """Whether one of ``roles`` may ask for ``op``."""
    return any(op in _OPS[role] for role in roles)


def may_hear(roles: Iterable[str]) -> bool:
    """Whether one of ``roles`` may subscribe to events."""
    return not MAY_HEAR_EVENTS.isdisjoint(roles)
