"""Messages between processes over ZeroMQ: requests, notices and events; the only import of zmq.

One event loop, one thread: no call here may come from another one.

    RequestClient.send ─▶ Pump ═══▶ Pump ─▶ RequestServer: session, call, gate ─▶ handler
    on_reply ◀─ RequestClient ◀─ Pump ═══ Pump ◀─ RequestServer.answer ◀─ Call.reply ◀┘

    EventPublisher.publish ─▶ Pump ═══▶ Pump ─▶ EventSubscriber: boot, seqs ─▶ EventListener

`Connecting` is what both that connect are: the address of a name, refusals, the boot id of the
peer, when it was heard, and whether its process is gone. `trust` lets others in, `sockets` has
every option of ZeroMQ.
"""
# ruff: noqa: F403  the files are the list

from kvbus.bus.client import *
from kvbus.bus.connection import *
from kvbus.bus.events import *
from kvbus.bus.server import *
from kvbus.bus.sockets import *
from kvbus.bus.trust import *
