"""The ranks of an engine of the benchmark: their sessions and caches, in one process.

Refuses to register the engine: its control session is the caller's.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from kvbus.bench.device import block_copy, private_cache
from kvbus.bench.shapes import GROUP, Shape
from kvbus.engine import KvCache, MemorySession
from kvbus.engine.bounce import HostPool, LocalCopier
from kvbus.geometry import EngineSpec
from kvbus.memory.threads import copy_on_one_thread

ATTACH_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Ring:
    """What a cache goes through that no agent maps."""

    blocks: HostPool
    copier: LocalCopier


@dataclass(frozen=True, slots=True)
class Ranks:
    """The caches of all ranks; ``ring`` when they are private memory."""

    caches: list[KvCache]
    ring: Ring | None = None


async def open_ranks(
    stack: AsyncExitStack, attach_path: str | Path, spec: EngineSpec, shape: Shape, num_blocks: int
) -> Ranks:
    """The caches of all ranks, each of ``num_blocks`` blocks, until ``stack`` is closed.

    A ring has half of that: the requests of the benchmark use every other block.
    """
    sessions = [
        await stack.enter_async_context(
            MemorySession(attach_path, spec, rank, attach_timeout_s=ATTACH_TIMEOUT_S)
        )
        for rank in range(spec.num_ranks)
    ]
    if not shape.host:
        return Ranks([await one.allocate(shape.layout, num_blocks=num_blocks) for one in sessions])
    copy_on_one_thread()  # else each block's copy waits for another thread to be woken
    ring = HostPool({GROUP: max(1, num_blocks // 2)})
    buffers = [await one.allocate_ring(ring.num_blocks) for one in sessions]
    caches = [private_cache(spec, rank) for rank in shape.ranks(num_blocks)]
    return Ranks(caches, Ring(ring, LocalCopier(buffers, block_copy(caches))))
