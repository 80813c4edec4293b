"""Messages between processes over ZeroMQ: requests, notices and events.

All calls must come from the event loop's thread.

    RequestClient.send ─▶ Pump ═══▶ Pump ─▶ RequestServer: session, call, gate ─▶ handler
    on_reply ◀─ RequestClient ◀─ Pump ═══ Pump ◀─ RequestServer.answer ◀─ Call.reply ◀┘

    EventPublisher.publish ─▶ Pump ═══▶ Pump ─▶ EventSubscriber: boot, seqs ─▶ EventListener
"""
# ruff: noqa: F403  the files are the list

from kvbus.bus.client import *
from kvbus.bus.connection import *
from kvbus.bus.events import *
from kvbus.bus.server import *
from kvbus.bus.sockets import *
from kvbus.bus.trust import *
