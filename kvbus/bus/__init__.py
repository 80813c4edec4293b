"""Messages between processes over ZeroMQ: requests, notices and events; the only import of zmq.

Refuses to know what any operation means. One event loop, one thread: no call here may come from
another one.
"""

from kvbus.bus.allowed import AllowedPeers
from kvbus.bus.boot import new_boot_id, new_secret
from kvbus.bus.client import OnReply, RequestClient, agent_client, ask_agent
from kvbus.bus.curve import (
    ClientCurve,
    KeyPair,
    ServerCurve,
    key_pair_of,
    new_key_pair,
    require_key,
)
from kvbus.bus.key_check import Applicant, KeyCheck
from kvbus.bus.limits import ServerCounters, ServerLimits
from kvbus.bus.names import look_up_all
from kvbus.bus.publisher import EventPublisher
from kvbus.bus.same_user import is_of_same_user
from kvbus.bus.server import Handlers, RequestServer, Shared
from kvbus.bus.session import Call, Session
from kvbus.bus.sockets import BusContext, SocketOptions, new_context, port_range
from kvbus.bus.subscriber import EventListener, EventSubscriber

__all__ = [
    "AllowedPeers",
    "Applicant",
    "BusContext",
    "Call",
    "ClientCurve",
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
    "agent_client",
    "ask_agent",
    "is_of_same_user",
    "key_pair_of",
    "look_up_all",
    "new_boot_id",
    "new_context",
    "new_key_pair",
    "new_secret",
    "port_range",
    "require_key",
]
