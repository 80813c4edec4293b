"""Messages between processes over ZeroMQ: requests, notices and events; the only import of zmq.

One event loop, one thread: no call here may come from another one.

    RequestClient.send ─▶ Pump ═══▶ Pump ─▶ RequestServer: session, call, gate ─▶ handler
    on_reply ◀─ RequestClient ◀─ Pump ═══ Pump ◀─ RequestServer.answer ◀─ Call.reply ◀┘

    EventPublisher.publish ─▶ Pump ═══▶ Pump ─▶ EventSubscriber: boot, seqs ─▶ EventListener

`Connection` is what both that connect have: the address of a name, refusals, the boot id of the
peer, when it was heard, and whether its process is gone. `trust` lets others in, `sockets` has
every option of ZeroMQ.
"""

from kvbus.bus.client import (
    OnReply,
    RequestClient,
    agent_client,
    ask_agent,
    new_boot_id,
    new_secret,
)
from kvbus.bus.connection import look_up_all
from kvbus.bus.events import EventListener, EventPublisher, EventSubscriber
from kvbus.bus.server import Call, Handlers, RequestServer, ServerLimits, Session, Shared
from kvbus.bus.sockets import BusContext, SocketOptions, new_context, port_range
from kvbus.bus.trust import (
    AllowedPeers,
    Applicant,
    ClientCurve,
    KeyCheck,
    KeyPair,
    ServerCurve,
    is_of_same_user,
    key_pair_of,
    new_key_pair,
    require_key,
)

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
