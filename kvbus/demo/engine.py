"""What both demo engines are: a model, its paged cache in shared memory, a thread that computes.

Refuses to compute two requests at once, as one device would, and to know agents but by the SDK.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import msgspec
from anyio import CapacityLimiter

from kvbus.demo.block_pool import BlockPool
from kvbus.demo.model import Transformer
from kvbus.demo.model_config import ModelConfig
from kvbus.demo.paged_cache import LayerViews, PagedKV
from kvbus.demo.work import (
    MAX_LINE_BYTES,
    Answer,
    Decode,
    EngineSetup,
    Prefill,
    Ready,
    Settle,
    Settled,
    Work,
)
from kvbus.engine import DecodeSession, KvCache, MemorySession, PrefillSession
from kvbus.errors import KVBusError, ProtocolError, leaves
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, KvPart

GROUP = "full"
ATTACH_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 5.0

T = TypeVar("T")
W = TypeVar("W", Prefill, Decode)
S = TypeVar("S", PrefillSession, DecodeSession)


@dataclass(slots=True)
class Engine:
    """One engine, attached and registered."""

    setup: EngineSetup
    model: Transformer
    kv: PagedKV
    pool: BlockPool
    _device: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))

    async def compute(self, step: Callable[[], T]) -> T:
        """Run ``step`` in the thread that stands for the device; the event loop goes on."""
        return await anyio.to_thread.run_sync(step, limiter=self._device)

    async def settle(self) -> Settled:
        """Wait, for a while, for blocks that are on their way back."""
        with anyio.move_on_after(SETTLE_TIMEOUT_S):
            await self.pool.all_free()
        return Settled(self.pool.num_held)


@contextlib.asynccontextmanager
async def attached_engine(setup: EngineSetup, control: type[S]) -> AsyncIterator[tuple[Engine, S]]:
    """The engine and its control session: one memory session a rank, all in this process."""
    model = Transformer(ModelConfig(seed=setup.seed))
    spec = engine_spec(setup, model.config)
    layout = KvLayout.parse(setup.layout, cross_layer=setup.cross_layer)
    async with contextlib.AsyncExitStack() as stack:
        views: list[list[LayerViews]] = []
        for rank in range(setup.tp):
            memory = await stack.enter_async_context(
                MemorySession(setup.attach_path, spec, rank, attach_timeout_s=ATTACH_TIMEOUT_S)
            )
            cache = await memory.allocate(layout, num_blocks=setup.num_blocks)
            views.append(layer_views(cache, model.config.num_layers))
        session = await stack.enter_async_context(control(setup.attach_path, spec))
        await session.register()
        await session.ready()
        pool = BlockPool(setup.num_blocks, seed=setup.engine_id)
        yield Engine(setup, model, PagedKV(views), pool), session


def engine_spec(setup: EngineSetup, config: ModelConfig) -> EngineSpec:
    """What the other side must know of the engine."""
    group = GroupSpec(
        name=GROUP,
        layers=tuple(range(config.num_layers)),
        block_size=setup.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=str(config.kv_dtype).removeprefix("torch."),
    )
    model = f"kvbus-demo@seed-{setup.seed}"
    return EngineSpec(engine_id=setup.engine_id, model=model, tp_size=setup.tp, groups=(group,))


def layer_views(cache: KvCache, num_layers: int) -> list[LayerViews]:
    """The views of a rank's shared cache as the model takes them."""
    return [
        LayerViews(k=cache.view(layer, KvPart.KEY), v=cache.view(layer, KvPart.VALUE))
        for layer in range(num_layers)
    ]


def answer(message: Answer) -> None:
    """Write one line to the driver."""
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


async def work_lines() -> AsyncIterator[Work]:
    """What the driver asks, until it closes the pipe."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield msgspec.json.decode(line, type=Work)


async def serve(
    engine: Engine,
    agent_endpoint: str,
    kind: type[W],
    handle: Callable[[W], Coroutine[Any, Any, None]],
) -> None:
    """Handle each line of work in a task of its own, until the driver closes the pipe."""
    answer(Ready(agent_endpoint))
    async with anyio.create_task_group() as tasks:
        async for work in work_lines():
            if isinstance(work, Settle):
                answer(await engine.settle())
            elif isinstance(work, kind):
                tasks.start_soon(handle, work)
            else:
                raise ProtocolError(f"this engine does not {type(work).__name__}")
        tasks.cancel_scope.cancel()


def run_engine(main: Callable[[EngineSetup], Awaitable[None]]) -> None:
    """The engine's process: its setup is the argument; an error is one line and exit status 1."""
    setup = msgspec.json.decode(sys.argv[1], type=EngineSetup)
    try:
        anyio.run(main, setup)
    except* KVBusError as errors:
        for error in leaves(errors):
            sys.stderr.write(f"error: {error.code}: {error.message}\n")
        raise SystemExit(1) from None
