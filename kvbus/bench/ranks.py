"""The ranks of an engine of the benchmark: their sessions and caches, in one process.

Refuses to register the engine: its control session is the caller's.
"""

from contextlib import AsyncExitStack
from pathlib import Path

from kvbus.bench.shapes import Shape
from kvbus.engine import KvCache, MemorySession
from kvbus.geometry import EngineSpec

ATTACH_TIMEOUT_S = 30.0


async def open_ranks(
    stack: AsyncExitStack, attach_path: str | Path, spec: EngineSpec, shape: Shape, num_blocks: int
) -> list[KvCache]:
    """The caches of all ranks, each of ``num_blocks`` blocks, until ``stack`` is closed."""
    caches = []
    for rank in range(spec.num_ranks):
        session = MemorySession(attach_path, spec, rank, attach_timeout_s=ATTACH_TIMEOUT_S)
        memory = await stack.enter_async_context(session)
        caches.append(await memory.allocate(shape.layout, num_blocks=num_blocks))
    return caches
