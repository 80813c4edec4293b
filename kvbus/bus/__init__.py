"""Messages between processes over ZeroMQ; all calls come from the event loop's thread.

RequestClient.send ─▶ Pump ═══▶ Pump ─▶ RequestServer: session, call, gate ─▶ handler
on_reply ◀─ RequestClient ◀─ Pump ═══ Pump ◀─ RequestServer ◀──────── Call.reply ◀┘

EventPublisher.publish ─▶ Pump ═══▶ Pump ─▶ EventSubscriber: boot, seqs ─▶ EventListener
"""

from kvbus.bus.admission import ServerLimits
from kvbus.bus.client import (
    OnReply,
    RequestClient,
    agent_client,
    call_agent,
    new_boot_id,
    new_secret,
)
from kvbus.bus.events import EventListener, EventPublisher, EventSubscriber
from kvbus.bus.server import Handlers, Quota, RequestServer
from kvbus.bus.session import Call, Session
from kvbus.bus.sockets import (
    BusContext,
    SocketOptions,
    new_context,
    open_router,
    port_range,
    with_brackets,
)
from kvbus.bus.trust import (
    AllowedPeers,
    ClientCurve,
    KeyPair,
    ServerCurve,
    ZapHandler,
    ZapRequest,
    is_of_same_user,
    key_pair_of,
    new_key_pair,
    require_key,
)

__all__ = [
    "AllowedPeers",
    "BusContext",
    "Call",
    "ClientCurve",
    "EventListener",
    "EventPublisher",
    "EventSubscriber",
    "Handlers",
    "KeyPair",
    "OnReply",
    "Quota",
    "RequestClient",
    "RequestServer",
    "ServerCurve",
    "ServerLimits",
    "Session",
    "SocketOptions",
    "ZapHandler",
    "ZapRequest",
    "agent_client",
    "call_agent",
    "is_of_same_user",
    "key_pair_of",
    "new_boot_id",
    "new_context",
    "new_key_pair",
    "new_secret",
    "open_router",
    "port_range",
    "require_key",
    "with_brackets",
]
