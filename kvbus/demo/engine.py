"""What both demo engines are: a model, its paged cache, a device, a line to the driver.

Refuses to compute two requests at once, as one device would, and to know agents but by the SDK.
"""

import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import anyio
import msgspec
from anyio import CapacityLimiter

from kvbus.demo.blocks import ShuffledPool, Tables
from kvbus.demo.device import device_copy, private_cache
from kvbus.demo.messages import NO_REQUEST, EngineSetup, Line, Ready, Settle, Settled
from kvbus.demo.model import Transformer
from kvbus.demo.options import Memory
from kvbus.demo.paged_cache import PagedKV
from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.engine.bounce import HostBuffer, HostPool, LocalCopier
from kvbus.errors import KVBusError, leaves
from kvbus.geometry import GroupSpec, KvLayout, num_blocks_for

PATIENCE_S = 600.0  # the driver gives up earlier, when nothing goes on
SETTLE_STALL_S = 20.0

T = TypeVar("T")
S = TypeVar("S", PrefillSession, DecodeSession)
Handlers = Mapping[type, Callable[[Any], Coroutine[Any, Any, None]]]


@dataclass(slots=True)
class DemoEngine(Generic[S]):
    """One engine, attached and registered; with a ``ring`` where no agent maps its cache."""

    setup: EngineSetup
    session: S
    model: Transformer
    kv: PagedKV
    blocks: ShuffledPool
    ring: tuple[HostPool, LocalCopier] | None
    line: Line
    _device: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))

    async def compute(self, step: Callable[[], T]) -> T:
        """Run ``step`` in the thread that stands for the device; the event loop goes on."""
        return await anyio.to_thread.run_sync(step, limiter=self._device)

    async def take(self, blocks_of: Callable[[GroupSpec], range]) -> Tables:
        """The blocks of one request, those of each group by their position."""
        wanted = {group.name: blocks_of(group) for group in self.session.engine.groups}
        return await self.blocks.take(wanted, wait_s=PATIENCE_S)

    async def serve(self, handlers: Handlers) -> None:
        """Handle each line of work in a task of its own, until the driver closes the line."""
        await self.line.send(Ready(NO_REQUEST, self.session.agent.peer_endpoint))
        handlers = {**handlers, Settle: self._settle}
        async with anyio.create_task_group() as tasks:
            async for work in self.line:
                tasks.start_soon(handlers[type(work)], work)
            tasks.cancel_scope.cancel()

    async def _settle(self, _: Settle) -> None:
        """Wait for blocks that are on their way back, as long as some come."""
        pools = [self.blocks] if self.ring is None else [self.blocks, self.ring[0]]
        before, held = -1, sum(pool.num_held for pool in pools)
        while held and held != before:
            with anyio.move_on_after(SETTLE_STALL_S):
                for pool in pools:
                    await pool.all_free()
            before, held = held, sum(pool.num_held for pool in pools)
        await self.line.send(Settled(NO_REQUEST, held))


@contextlib.asynccontextmanager
async def attached_engine(
    setup: EngineSetup, line: Line, control: type[S]
) -> AsyncIterator[DemoEngine[S]]:
    """The engine with all its sessions: one memory session a rank, and ``control``."""
    shape, config = setup.shape, setup.model
    spec = config.spec(setup.engine_id, block_size=shape.block_size, tp=shape.tp, pp=shape.pp)
    per_request = num_blocks_for(setup.max_tokens, shape.block_size)
    num_blocks = dict.fromkeys(config.groups, setup.concurrency * per_request)
    layout = KvLayout.parse(shape.layout, cross_layer=shape.cross_layer)
    async with contextlib.AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                MemorySession(setup.attach_path, spec, rank, attach_timeout_s=PATIENCE_S)
            )
            for rank in range(spec.num_ranks)
        ]
        ring = None
        if shape.memory is Memory.SHARED:
            caches = [await rank.allocate(layout, num_blocks=num_blocks) for rank in ranks]
        else:
            caches = [private_cache(spec, rank.rank, layout, num_blocks) for rank in ranks]
            share = setup.ring_share
            pool = HostPool({group: max(1, round(share * n)) for group, n in num_blocks.items()})
            buffers = [HostBuffer(spec, rank.rank, pool.num_blocks) for rank in ranks]
            for rank, buffer in zip(ranks, buffers, strict=True):
                await rank.keep(buffer.memory)
            ring = pool, LocalCopier(buffers, device_copy(caches))
        session = await stack.enter_async_context(control(setup.attach_path, spec))
        await session.register()
        await session.ready()
        model, blocks = Transformer(config), ShuffledPool(num_blocks, seed=setup.engine_id)
        yield DemoEngine(setup, session, model, PagedKV.of(caches), blocks, ring, line)


def run_engine(control: type[S], serve: Callable[[DemoEngine[S]], Awaitable[None]]) -> None:
    """The engine's process: its setup is the argument, its stdin the line to the driver.

    It serves until the driver closes the line. An error is one line on stderr and exit status 1.
    """
    setup = msgspec.json.decode(sys.argv[1], type=EngineSetup)
    failures: list[KVBusError] = []

    async def run() -> None:
        line = await Line.over(socket.socket(fileno=sys.stdin.fileno()))
        with contextlib.closing(line):
            async with attached_engine(setup, line, control) as engine:
                await serve(engine)

    try:
        anyio.run(run)
    except* KVBusError as errors:
        failures = leaves(errors)
    if failures:
        sys.stderr.writelines(f"error: {error.code}: {error.message}\n" for error in failures)
        raise SystemExit(1)
