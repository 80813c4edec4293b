"""What both demo engines are: a model, an engine that holds its cache, a line to the driver.

Two requests are never computed at once, as on one device.
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

from kvbus.demo.messages import NO_REQUEST, EngineSetup, Line, Ready, Settle, Settled
from kvbus.demo.model import Transformer
from kvbus.demo.options import Memory
from kvbus.demo.paged_cache import PagedKV
from kvbus.errors import KVBusError, leaves
from kvbus.geometry import GroupSpec, KvLayout, num_blocks_for
from kvbus.lab.engine import Engine, Tables

PATIENCE_S = 600.0  # the driver gives up earlier, when nothing goes on

T = TypeVar("T")
Handlers = Mapping[type, Callable[[Any], Coroutine[Any, Any, None]]]


@dataclass(slots=True)
class DemoEngine:
    """One engine, attached and registered."""

    setup: EngineSetup
    engine: Engine
    model: Transformer
    kv: PagedKV
    line: Line
    _device: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))

    async def compute(self, step: Callable[[], T]) -> T:
        """Run ``step`` in the thread that stands for the device; the event loop goes on."""
        return await anyio.to_thread.run_sync(step, limiter=self._device)

    async def take(self, blocks_of: Callable[[GroupSpec], range]) -> Tables:
        """The blocks of one request, those of each group by their position."""
        wanted = {group.name: blocks_of(group) for group in self.engine.spec.groups}
        return await self.engine.blocks.take(wanted, wait_s=PATIENCE_S)

    async def serve(self, handlers: Handlers) -> None:
        """Handle each line of work in a task of its own, until the driver closes the line."""
        await self.line.send(Ready(NO_REQUEST, self.engine.link.agent.peer_endpoint))
        handlers = {**handlers, Settle: self._settle}
        async with anyio.create_task_group() as tasks:
            async for work in self.line:
                tasks.start_soon(handlers[type(work)], work)
            tasks.cancel_scope.cancel()

    async def _settle(self, _: Settle) -> None:
        await self.engine.settle()
        await self.line.send(Settled(NO_REQUEST, self.engine.num_held))


@contextlib.asynccontextmanager
async def attached_engine(setup: EngineSetup, line: Line) -> AsyncIterator[DemoEngine]:
    """The engine, and what it computes with."""
    shape, config = setup.shape, setup.model
    per_request = num_blocks_for(setup.max_tokens, shape.block_size)
    num_blocks = dict.fromkeys(config.groups, setup.concurrency * per_request)
    ring_blocks = None
    if shape.memory is Memory.HOST:
        ring_blocks = {name: max(1, round(setup.ring_share * n)) for name, n in num_blocks.items()}
    engine = Engine(
        setup.attach_path,
        config.spec(setup.engine_id, block_size=shape.block_size, tp=shape.tp, pp=shape.pp),
        KvLayout.parse(shape.layout, cross_layer=shape.cross_layer),
        num_blocks=num_blocks,
        ring_blocks=ring_blocks,
        attach_timeout_s=PATIENCE_S,
        wait_s=PATIENCE_S,
    )
    async with engine:
        yield DemoEngine(setup, engine, Transformer(config), PagedKV.of(engine.caches), line)


def run_engine(serve: Callable[[DemoEngine], Awaitable[None]]) -> None:
    """The engine's process: its setup is the argument, its stdin the line to the driver.

    It serves until the driver closes the line. An error is one line on stderr and exit status 1.
    """
    setup = msgspec.json.decode(sys.argv[1], type=EngineSetup)
    failures: list[KVBusError] = []

    async def run() -> None:
        line = await Line.over(socket.socket(fileno=sys.stdin.fileno()))
        with contextlib.closing(line):
            async with attached_engine(setup, line) as engine:
                await serve(engine)

    try:
        anyio.run(run)
    except* KVBusError as errors:
        failures = leaves(errors)
    if failures:
        sys.stderr.writelines(f"error: {error.code}: {error.message}\n" for error in failures)
        raise SystemExit(1)
