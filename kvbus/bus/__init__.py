"""Messages between processes over ZeroMQ: requests, notices and events; the only import of zmq.

Refuses to know what any operation means. One event loop, one thread: no call here may come from
another one.
"""

from kvbus.bus.allowed import AllowedPeers
from kvbus.bus.ask import agent_client, ask_agent
from kvbus.bus.boot import new_boot_id, new_secret
from kvbus.bus.client import RequestClient
from kvbus.bus.curve import (
    ClientCurve,
    KeyPair,
    ServerCurve,
    key_pair_of,
    new_key_pair,
    require_key,
)
from kvbus.bus.door import DoorLimits, Ended, EndReason
from kvbus.bus.guard import ConnectionGuard
from kvbus.bus.key_check import Applicant, KeyCheck
from kvbus.bus.limits import ClientCounters, ServerCounters, ServerLimits, SubscriberCounters
from kvbus.bus.names import look_up_all
from kvbus.bus.pending import OnReply
from kvbus.bus.publisher import EventPublisher
from kvbus.bus.server import Handlers, RequestServer, Shared
from kvbus.bus.session import Call, Session
from kvbus.bus.sockets import BusContext, SocketOptions, new_context, port_range
from kvbus.bus.subscriber import EventListener, EventSubscriber
from kvbus.bus.traffic import Watch

__all__ = [
    "AllowedPeers",
    "Applicant",
    "BusContext",
    "Call",
    "ClientCounters",
    "ClientCurve",
    "ConnectionGuard",
    "DoorLimits",
    "EndReason",
    "Ended",
    "EventListener",
    "EventPublisher",
    "EventSubscriber",
    "Handlers",
    "KeyCheck",
    "KeyPair",
    "OnReply",
    "RequestClient",
    "RequestServer",
    "ServerCounters",
    "ServerCurve",
    "ServerLimits",
    "Session",
    "Shared",
    "SocketOptions",
    "SubscriberCounters",
    "Watch",
    "agent_client",
    "ask_agent",
    "key_pair_of",
    "look_up_all",
    "new_boot_id",
    "new_context",
    "new_key_pair",
    "new_secret",
    "port_range",
    "require_key",
]
