"""What both demo engines are: a model, its paged cache, a device, a line to the driver.

Refuses to compute two requests at once, as one device would, and to know agents but by the SDK.
"""

import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import msgspec
from anyio import CapacityLimiter

from kvbus.demo.blocks import ShuffledPool, Tables
from kvbus.demo.device import device_copy, private_cache
from kvbus.demo.messages import (
    NO_REQUEST,
    EngineSetup,
    Failed,
    Line,
    Ready,
    Settle,
    Settled,
    Work,
)
from kvbus.demo.model import Generation, Transformer
from kvbus.demo.options import Memory
from kvbus.demo.paged_cache import LayerViews, PagedKV
from kvbus.engine import DecodeSession, KvCache, MemorySession, PrefillSession
from kvbus.engine.bounce import Copier, HostPool, LocalCopier
from kvbus.errors import KVBusError, ProtocolError, leaves
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, KvPart

PATIENCE_S = 600.0  # the driver gives up earlier, when nothing goes on
SETTLE_STALL_S = 20.0

T = TypeVar("T")
S = TypeVar("S", PrefillSession, DecodeSession)
Handlers = Mapping[type, Callable[[Any], Coroutine[Any, Any, None]]]


@dataclass(slots=True)
class DemoEngine:
    """One engine, attached and registered; with ``ring`` and ``copier`` where no agent maps it."""

    setup: EngineSetup
    spec: EngineSpec
    model: Transformer
    kv: PagedKV
    blocks: ShuffledPool
    line: Line[Work]
    ring: HostPool | None = None
    copier: Copier | None = None
    _device: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))

    async def compute(self, step: Callable[[], T]) -> T:
        """Run ``step`` in the thread that stands for the device; the event loop goes on."""
        return await anyio.to_thread.run_sync(step, limiter=self._device)

    async def take(self, blocks_of: Callable[[GroupSpec], range]) -> Tables:
        """The blocks of one request, those of each group by their position."""
        wanted = {group.name: blocks_of(group) for group in self.spec.groups}
        return await self.blocks.take(wanted, wait_s=PATIENCE_S)

    def generation(self, tables: Tables) -> Generation:
        """A request that has these blocks."""
        return Generation(self.model, self.kv, tables)

    async def tell_failed(self, request_id: str, error: KVBusError) -> None:
        """The request ends without its KV."""
        await self.line.send(Failed(request_id, error.code, error.message))

    async def serve(self, agent_endpoint: str, handlers: Handlers) -> None:
        """Handle each line of work in a task of its own, until the driver closes the line."""
        await self.line.send(Ready(NO_REQUEST, agent_endpoint))
        async with anyio.create_task_group() as tasks:
            async for work in self.line:
                if isinstance(work, Settle):
                    await self.line.send(Settled(NO_REQUEST, await self._settle()))
                elif type(work) in handlers:
                    tasks.start_soon(handlers[type(work)], work)
                else:
                    raise ProtocolError(f"this engine does not {type(work).__name__}")
            tasks.cancel_scope.cancel()

    async def _settle(self) -> int:
        """Wait for blocks that are on their way back, as long as some come; how many are held."""
        pools = [self.blocks] if self.ring is None else [self.blocks, self.ring]
        before, held = -1, sum(pool.num_held for pool in pools)
        while held and held != before:
            with anyio.move_on_after(SETTLE_STALL_S):
                for pool in pools:
                    await pool.all_free()
            before, held = held, sum(pool.num_held for pool in pools)
        return held


@contextlib.asynccontextmanager
async def attached_engine(
    setup: EngineSetup, line: Line[Work], control: type[S], most_blocks: Callable[[GroupSpec], int]
) -> AsyncIterator[tuple[DemoEngine, S]]:
    """The engine and its control session: one memory session a rank, all in this process.

    ``most_blocks`` says how many blocks of a group one request can need.
    """
    shape, spec = setup.shape, engine_spec(setup)
    num_blocks = {group.name: setup.concurrency * most_blocks(group) for group in spec.groups}
    layout = KvLayout.parse(shape.layout, cross_layer=shape.cross_layer)
    async with contextlib.AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                MemorySession(setup.attach_path, spec, rank, attach_timeout_s=PATIENCE_S)
            )
            for rank in range(spec.num_ranks)
        ]
        ring, copier = None, None
        if shape.memory is Memory.SHARED:
            caches = [await rank.allocate(layout, num_blocks=num_blocks) for rank in ranks]
        else:
            caches = [private_cache(spec, rank.rank, layout, num_blocks) for rank in ranks]
            share = setup.ring_share
            ring = HostPool({group: max(1, round(share * n)) for group, n in num_blocks.items()})
            buffers = [await rank.allocate_ring(ring.num_blocks) for rank in ranks]
            copier = LocalCopier(buffers, device_copy(caches))
        session = await stack.enter_async_context(control(setup.attach_path, spec))
        await session.register()
        await session.ready()
        model, kv = Transformer(setup.model), PagedKV([layer_views(cache) for cache in caches])
        blocks = ShuffledPool(num_blocks, seed=setup.engine_id)
        yield DemoEngine(setup, spec, model, kv, blocks, line, ring, copier), session


def engine_spec(setup: EngineSetup) -> EngineSpec:
    """What the other side must know of the engine."""
    config = setup.model
    groups = tuple(
        GroupSpec(
            name=name,
            layers=layers,
            block_size=setup.shape.block_size,
            num_kv_heads=config.cache_heads,
            head_dim=config.cache_dim,
            dtype=config.kv_dtype,
            parts=config.parts,
            window=config.window_of(layers[0]),
        )
        for name, layers in config.groups.items()
    )
    return EngineSpec(
        engine_id=setup.engine_id,
        model=f"kvbus-demo@seed-{config.seed}",
        tp_size=setup.shape.tp,
        pp_size=setup.shape.pp,
        groups=groups,
    )


def layer_views(cache: KvCache) -> dict[int, LayerViews]:
    """The views of a rank's cache as the model takes them, by layer."""
    return {
        layer: {KvPart(part): cache.view(layer, part) for part in region.parts}
        for region in cache.rank.regions
        for layer in region.layers
    }


def run_engine(main: Callable[[EngineSetup, Line[Work]], Awaitable[None]]) -> None:
    """The engine's process: its setup is the argument, its stdin the line to the driver.

    An error is one line on stderr and exit status 1.
    """
    setup = msgspec.json.decode(sys.argv[1], type=EngineSetup)
    failures: list[KVBusError] = []

    async def run() -> None:
        line: Line[Work] = await Line.over(socket.socket(fileno=sys.stdin.fileno()), Work)
        try:
            await main(setup, line)
        finally:
            line.close()

    try:
        anyio.run(run)
    except* KVBusError as errors:
        failures = leaves(errors)
    if failures:
        sys.stderr.writelines(f"error: {error.code}: {error.message}\n" for error in failures)
        raise SystemExit(1)
