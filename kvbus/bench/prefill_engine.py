"""The prefill engine of the benchmark: a process of its own that offers blocks when told to.

Refuses to compute: its caches are filled with a pattern once.
"""

import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup

from kvbus.bench.pattern import all_words
from kvbus.bench.shapes import BLOCK_SIZE, GROUP, SHAPES
from kvbus.bench.words import fill
from kvbus.bus import Call, RequestServer, new_boot_id, new_context
from kvbus.engine import MemorySession, PrefillSession
from kvbus.errors import KVBusError
from kvbus.protocol.engine import Released
from kvbus.protocol.envelope import Body

ATTACH_TIMEOUT_S = 30.0


@dataclass(slots=True, eq=False)
class Engine:
    """One engine with its sessions; ``lived_s`` are the ended offers since they were last told."""

    attach_path: str
    shape: str
    engine_id: str
    num_blocks: int
    control: PrefillSession = field(init=False)
    offered_at: dict[str, float] = field(default_factory=dict)
    lived_s: dict[str, float] = field(default_factory=dict)
    settled: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    closed: anyio.Event = field(default_factory=anyio.Event)

    async def live(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Attach, fill the cache, and stay until the scope is cancelled."""
        shape = SHAPES[self.shape]
        spec = shape.spec(self.engine_id)
        self.control = PrefillSession(
            self.attach_path,
            spec,
            attach_timeout_s=ATTACH_TIMEOUT_S,
            on_released=self._on_released,
        )
        try:
            async with (
                MemorySession(
                    self.attach_path, spec, 0, attach_timeout_s=ATTACH_TIMEOUT_S
                ) as memory,
                self.control,
            ):
                cache = await memory.allocate(shape.layout, num_blocks=self.num_blocks)
                fill(all_words(cache))
                await self.control.register()
                await self.control.ready()
                task_status.started()
                with self.scope:
                    await anyio.sleep_forever()
        finally:
            self.closed.set()

    async def offer(self, request_id: str, blocks: list[int]) -> dict[str, Any]:
        """Offer full blocks; returns the ticket."""
        began = time.perf_counter()
        offer = await self.control.offer(
            request_id, num_tokens=BLOCK_SIZE * len(blocks), block_ids={GROUP: blocks}
        )
        self.offered_at[offer.offer_id] = began
        return offer.ticket

    async def settle(self) -> dict[str, float]:
        """Wait until no offer is live; seconds from each offer to its release, by offer."""
        while self.offered_at:
            self.settled = anyio.Event()
            await self.settled.wait()
        lived_s, self.lived_s = self.lived_s, {}
        return lived_s

    def _on_released(self, released: Released) -> None:
        began = self.offered_at.pop(released.offer_id)
        self.lived_s[released.offer_id] = time.perf_counter() - began
        if not self.offered_at:
            self.settled.set()


class Commands:
    """What the benchmark may ask for, by the name of the request."""

    def __init__(self, attach_path: str, tasks: TaskGroup) -> None:
        self._attach_path, self._tasks = attach_path, tasks
        self._engines: dict[str, Engine] = {}

    def handle(self, call: Call) -> None:
        """Answer a request when it is done."""
        names: dict[str, Callable[[Body], Awaitable[dict[str, Any]]]] = {
            "open": self._open,
            "offer": self._offer,
            "settle": self._settle,
            "close": self._close,
        }
        self._tasks.start_soon(self._answer, call, names[call.op])

    async def _answer(self, call: Call, command: Callable[[Body], Awaitable[Any]]) -> None:
        try:
            reply = await command(call.body)
        except KVBusError as error:
            call.refuse(error)
        else:
            call.reply(reply)

    async def _open(self, body: Body) -> dict[str, Any]:
        engine = Engine(self._attach_path, body["shape"], body["engine_id"], body["num_blocks"])
        await self._tasks.start(engine.live)
        self._engines[engine.engine_id] = engine
        return {}

    async def _offer(self, body: Body) -> dict[str, Any]:
        """Several offers at once, as after one step of an engine."""
        engine = self._engines[body["engine_id"]]
        tickets: dict[str, Any] = {}

        async def offer(request_id: str, blocks: list[int]) -> None:
            tickets[request_id] = await engine.offer(request_id, blocks)

        async with anyio.create_task_group() as offers:
            for request_id, blocks in body["requests"].items():
                offers.start_soon(offer, request_id, blocks)
        return tickets

    async def _settle(self, body: Body) -> dict[str, Any]:
        return await self._engines[body["engine_id"]].settle()

    async def _close(self, body: Body) -> dict[str, Any]:
        engine = self._engines.pop(body["engine_id"])
        engine.scope.cancel()
        await engine.closed.wait()
        return {}


async def serve(attach_path: str, endpoint: str) -> None:
    """Serve until the parent closes this process's stdin."""
    with new_context() as context:
        async with anyio.create_task_group() as tasks:
            commands = Commands(attach_path, tasks)
            server = RequestServer(context, endpoint, boot=new_boot_id(), handler=commands.handle)
            tasks.start_soon(server.run)
            await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(serve, sys.argv[1], sys.argv[2])
