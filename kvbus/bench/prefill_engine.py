"""The prefill engine of the benchmark: a process of its own that offers blocks when told to.

Refuses to compute: its caches are filled with a pattern once.
"""

import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from kvbus.bench.commands import (
    AwaitEnded,
    BenchEnded,
    BenchTickets,
    CloseEngine,
    ComputeRequest,
    OfferRequests,
    OpenEngine,
    SaveRequest,
)
from kvbus.bench.pattern import fill_ranks
from kvbus.bench.ranks import ATTACH_TIMEOUT_S, open_ranks
from kvbus.bench.shapes import GROUP, SHAPES
from kvbus.bus import Call, Handlers, RequestServer, new_boot_id, new_context
from kvbus.engine import Offer, PrefillSession
from kvbus.engine.bounce import HostOffer, HostPrefill
from kvbus.errors import KVBusError, LocalError
from kvbus.protocol.engine import Released
from kvbus.protocol.message import Empty, Message, Request

Command = Callable[[Any], Awaitable[Message]]


@dataclass(slots=True, eq=False)
class Engine:
    """One engine with its sessions; ``ended`` are the offers that ended since they were last told.

    Of each, when its last tokens were ready, and when it was released.
    """

    attach_path: str
    shape: str
    engine_id: str
    num_blocks: int
    control: PrefillSession = field(init=False)
    host: HostPrefill | None = None
    offered_at: dict[str, float] = field(default_factory=dict)
    ended: dict[str, tuple[float, float]] = field(default_factory=dict)
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
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self.control)
                ranks = await open_ranks(stack, self.attach_path, spec, shape, self.num_blocks)
                fill_ranks(ranks.caches, shape)
                if ranks.ring is not None:
                    self.host = HostPrefill(self.control, ranks.ring.blocks, ranks.ring.copier)
                await self.control.register()
                await self.control.ready()
                task_status.started()
                with self.scope:
                    await anyio.sleep_forever()
        finally:
            self.closed.set()

    async def offer(self, request_id: str, num_tokens: int, blocks: list[int]) -> dict[str, Any]:
        """Offer tokens; returns the ticket."""
        began = time.perf_counter()
        offer = await self.control.offer(
            request_id, num_tokens=num_tokens, block_ids={GROUP: blocks}
        )
        self.offered_at[offer.offer_id] = began
        return offer.ticket

    async def begin_save(self, request_id: str, num_tokens: int) -> HostOffer:
        """Room for a request in the ring; raises `LocalError` without one."""
        if self.host is None:
            raise LocalError(f"engine '{self.engine_id}' has no ring")
        return await self.host.begin(request_id, num_tokens=num_tokens)

    async def offer_saved(self, offer: HostOffer) -> dict[str, Any]:
        """Offer what is being saved; returns the ticket."""
        ticket = await offer.offer()
        self.offered_at[offer.offer_id] = time.perf_counter()
        return ticket

    async def save(self, offer: HostOffer, num_tokens: int, blocks: list[int]) -> None:
        """Copy all of it, piece by piece; it is offered by then."""
        await offer.save(num_tokens, {GROUP: blocks})
        await offer.seal()

    async def open(self, request_id: str, blocks: list[int]) -> Offer:
        """An open offer of no tokens yet."""
        offer = await self.control.offer(
            request_id, num_tokens=0, block_ids={GROUP: blocks}, sealed=False
        )
        self.offered_at[offer.offer_id] = time.perf_counter()
        return offer

    async def compute(self, offer: Offer, num_tokens: int, num_chunks: int, chunk_s: float) -> None:
        """Make a chunk of tokens ready every ``chunk_s``; the last one seals the offer.

        What it tells is when the last chunk was ready: its computing is over then.
        """
        for chunk in range(1, num_chunks + 1):
            await anyio.sleep(chunk_s)
            self.offered_at[offer.offer_id] = time.perf_counter()
            await offer.extend(num_tokens * chunk // num_chunks)
        await offer.seal()

    async def settle(self) -> dict[str, tuple[float, float]]:
        """Wait until no offer is live; what has ended by then."""
        while self.offered_at:
            self.settled = anyio.Event()
            await self.settled.wait()
        ended, self.ended = self.ended, {}
        return ended

    def _on_released(self, released: Released) -> None:
        ready_at = self.offered_at.pop(released.offer_id)
        self.ended[released.offer_id] = ready_at, time.perf_counter()
        if not self.offered_at:
            self.settled.set()


class Commands:
    """What the benchmark may ask for, by the class of the request."""

    def __init__(self, attach_path: str, tasks: TaskGroup) -> None:
        self._attach_path, self._tasks = attach_path, tasks
        self._engines: dict[str, Engine] = {}

    def handlers(self) -> Handlers:
        """Each answers its request when it is done."""
        commands: dict[type[Request[Any]], Command] = {
            OpenEngine: self._open,
            OfferRequests: self._offer,
            ComputeRequest: self._compute,
            SaveRequest: self._save,
            AwaitEnded: self._settle,
            CloseEngine: self._close,
        }
        return {kind: partial(self._begin, command) for kind, command in commands.items()}

    def _begin(self, command: Command, message: Request[Any], call: Call) -> None:
        self._tasks.start_soon(self._answer, command, message, call)

    async def _answer(self, command: Command, message: Request[Any], call: Call) -> None:
        try:
            reply = await command(message)
        except KVBusError as error:
            call.refuse(error)
        else:
            call.reply(reply)

    async def _open(self, asked: OpenEngine) -> Empty:
        engine = Engine(self._attach_path, asked.shape, asked.engine_id, asked.num_blocks)
        await self._tasks.start(engine.live)
        self._engines[engine.engine_id] = engine
        return Empty()

    async def _offer(self, asked: OfferRequests) -> BenchTickets:
        """Several offers at once, as after one step of an engine."""
        engine = self._engines[asked.engine_id]
        tickets: dict[str, dict[str, Any]] = {}

        async def offer(request_id: str, num_tokens: int, blocks: list[int]) -> None:
            tickets[request_id] = await engine.offer(request_id, num_tokens, blocks)

        async with anyio.create_task_group() as offers:
            for request_id, (num_tokens, blocks) in asked.requests.items():
                offers.start_soon(offer, request_id, num_tokens, blocks)
        return BenchTickets(tickets=tickets)

    async def _compute(self, asked: ComputeRequest) -> BenchTickets:
        """A prefill in chunks, offered as it goes on; answers at once, with the ticket."""
        engine = self._engines[asked.engine_id]
        offer = await engine.open(asked.request_id, asked.blocks)
        chunks = asked.num_tokens, asked.num_chunks, asked.chunk_s
        self._tasks.start_soon(engine.compute, offer, *chunks)
        return BenchTickets(tickets={asked.request_id: dict(offer.ticket)})

    async def _save(self, asked: SaveRequest) -> BenchTickets:
        """An offer that is saved into the ring meanwhile; answers at once, with the ticket."""
        engine, num_tokens = self._engines[asked.engine_id], asked.num_tokens
        offer = await engine.begin_save(asked.request_id, num_tokens)
        self._tasks.start_soon(engine.save, offer, num_tokens, asked.blocks)
        return BenchTickets(tickets={asked.request_id: await engine.offer_saved(offer)})

    async def _settle(self, asked: AwaitEnded) -> BenchEnded:
        return BenchEnded(times=await self._engines[asked.engine_id].settle())

    async def _close(self, asked: CloseEngine) -> Empty:
        engine = self._engines.pop(asked.engine_id)
        engine.scope.cancel()
        await engine.closed.wait()
        return Empty()


async def serve(attach_path: str, endpoint: str) -> None:
    """Serve until the parent closes this process's stdin."""
    with new_context() as context:
        async with anyio.create_task_group() as tasks:
            server = RequestServer(context, endpoint, boot=new_boot_id())
            server.on(Commands(attach_path, tasks).handlers())
            tasks.start_soon(server.run)
            await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(serve, sys.argv[1], sys.argv[2])
