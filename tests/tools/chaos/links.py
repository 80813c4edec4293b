"""A TCP proxy between decode agents and a prefill agent, with faults that last until `heal`.

A prefill agent binds at 127.0.0.1 and advertises 127.0.0.2, where the proxy listens at the same
port.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

AGENT_HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"
READ_BYTES = 1 << 16
TRICKLE_S = 0.02
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset."""


@dataclass(eq=False)
class Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None

    def end(self, *, reset: bool = False) -> None:
        for writer in filter(None, (self.client, self.server)):
            if reset:
                wire = writer.get_extra_info("socket")
                with suppress(OSError):
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.close()


class Link:
    """All connections to one socket of an agent; ``latest`` is what a client said last."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections: set[Connection] = set()
        self.latest = b""
        self._passes = asyncio.Event()
        self._delay_s, self._trickle_bytes = 0.0, 0
        self.is_down = False
        self._passes.set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, PROXY_HOST, self._port)

    async def close(self) -> None:
        self._server.close()
        self.cut()

    def heal(self) -> None:
        self.is_down, self._delay_s, self._trickle_bytes = False, 0.0, 0
        self._passes.set()

    def cut(self, *, reset: bool = False) -> None:
        for one in list(self.connections):
            one.end(reset=reset)

    def take_down(self) -> None:
        self.is_down = True
        self.cut()

    def blacken(self) -> None:
        self._passes.clear()

    def delay(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def trickle(self, num_bytes: int) -> None:
        self._trickle_bytes = num_bytes

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one = Connection(writer)
        if self.is_down:
            one.end(reset=True)
            return
        self.connections.add(one)
        try:
            with suppress(OSError):
                upstream, one.server = await asyncio.open_connection(AGENT_HOST, self._port)
                ways = (
                    self._pass(reader, one.server, is_request=True),
                    self._pass(upstream, writer, is_request=False),
                )
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self.connections.discard(one)
            one.end()

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_request: bool
    ) -> None:
        while some := await source.read(READ_BYTES):
            if is_request:
                self.latest = some
            await self._let(some, is_request=is_request)
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            while some:
                few = self._trickle_bytes
                sink.write(some[: few or None])
                await sink.drain()
                some = some[few:] if few else b""
                if some:
                    await asyncio.sleep(TRICKLE_S)

    async def _let(self, some: bytes, *, is_request: bool) -> None:
        await self._passes.wait()
