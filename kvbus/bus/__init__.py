"""Messages between processes over ZeroMQ: requests, notices and events; the only import of zmq.

Refuses to know what any operation means. One event loop, one thread: no call here may come from
another one.
"""

from kvbus.bus.ask import ask_agent
from kvbus.bus.boot import new_boot_id
from kvbus.bus.client import OnReply, RequestClient
from kvbus.bus.limits import ClientCounters, ServerCounters, ServerLimits, SubscriberCounters
from kvbus.bus.publisher import EventPublisher
from kvbus.bus.server import Handlers, RequestServer
from kvbus.bus.session import Call, Session
from kvbus.bus.sockets import BusContext, SocketOptions, new_context
from kvbus.bus.subscriber import EventListener, EventSubscriber

__all__ = [
    "BusContext",
    "Call",
    "ClientCounters",
    "EventListener",
    "EventPublisher",
    "EventSubscriber",
    "Handlers",
    "OnReply",
    "RequestClient",
    "RequestServer",
    "ServerCounters",
    "ServerLimits",
    "Session",
    "SocketOptions",
    "SubscriberCounters",
    "ask_agent",
    "new_boot_id",
    "new_context",
]
