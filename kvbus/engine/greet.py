"""Asks who an agent is, without becoming an engine of it."""

from pathlib import Path

from kvbus.bus import new_boot_id
from kvbus.memory.attach import AttachClient
from kvbus.protocol.attach import Hello, Welcome
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.message import read_reply, to_body


async def greet(attach: Path) -> Welcome:
    """Who listens at ``attach``, and where its other sockets are.

    Raises `PeerLost` or `RequestRefused` (``busy``) while it is not ready.
    """
    hello = Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, engine_id="greeting", boot=new_boot_id())
    async with AttachClient(attach) as client:
        return read_reply(hello, await client.call({"op": hello.op, "body": to_body(hello)}))
