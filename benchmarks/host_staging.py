"""Measures handoffs whose KV passes through host blocks, each pair of memories in turn.

Run it from the repository's root: ``python benchmarks/host_staging.py``. Two agents, and the
engines of both sides in this process; a device is private memory here, and its bare copies are
timed, too. 64 MiB in scattered blocks: from the request to offer until it is on the other side.
"""

import argparse
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import numpy as np
import torch
from torch import Tensor

from kvbus.bench.bench_engine import BIG, GROUP, PairedBlocks, scattered
from kvbus.bench.figures import Ways, in_turn
from kvbus.bench.pairs import agent
from kvbus.engine import AgentRole, KvCache
from kvbus.engine.bounce import BlockCopy, CopyBlocks, Direction
from kvbus.geometry import KvPart
from kvbus.lab.lab_engine import Engine, private_cache

NUM_BLOCKS = (64 << 20) // BIG.block_bytes
MEMORIES = ("shared", "host")


def cache_copy(caches: Sequence[KvCache]) -> CopyBlocks:
    """Copies whole blocks of one rank's cache, each of which is one piece of memory."""
    (cache,) = caches
    torch.set_num_threads(1)  # else each block's copy waits for another thread to be woken
    part = cache.view(0, KvPart.KEY)
    words = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()).view(torch.int64)
    device = words.view(part.shape[0], -1)

    def copy(blocks: BlockCopy, ring: Tensor, direction: Direction) -> None:
        slots = ring.reshape(len(ring), -1).view(torch.int64)
        ids = torch.from_numpy(blocks.ids.astype(np.int64))
        if direction is Direction.SAVE:
            torch.index_select(device, 0, ids, out=slots)
        else:
            torch._foreach_copy_([device[block_id] for block_id in ids.tolist()], list(slots))

    return copy


def engine(attach_path: Path, role: AgentRole, memory: str) -> Engine:
    """One whose cache is mapped, or private memory beside a ring of half as many blocks."""
    options: dict[str, Any] = {"num_blocks": {GROUP: 2 * NUM_BLOCKS}, "attach_timeout_s": 30.0}
    if memory == "host":
        options |= {"ring_blocks": {GROUP: NUM_BLOCKS}, "copy_of": cache_copy}
    return Engine(attach_path, BIG.engine(uuid.uuid4().hex), BIG.parse(), role=role, **options)


async def handed_over_s(prefill: Engine, decode: Engine, tables: PairedBlocks) -> float:
    """Seconds of one, from the request to offer until the fetch is complete."""
    began, num_tokens = time.monotonic(), tables.num_tokens
    offered = await prefill.offer(
        uuid.uuid4().hex, num_tokens=num_tokens, block_ids={GROUP: tables.prefill}
    )
    fetch = decode.fetch(offered.ticket, num_tokens=num_tokens, block_ids={GROUP: tables.decode})
    taken = await fetch.timed()
    await prefill.settle()
    return taken.at_s - began


async def pass_s(tables: PairedBlocks, direction: Direction) -> float:
    """Seconds of a bare pass over the bytes, between blocks of a device and those of a ring."""
    device = private_cache(BIG.engine("any"), 0, BIG.parse(), 2 * NUM_BLOCKS)
    copy = cache_copy([device])
    ring = torch.zeros(NUM_BLOCKS, BIG.block_bytes, dtype=torch.uint8)
    blocks = BlockCopy(
        group=GROUP,
        ids=tables.prefill.astype(np.uint32),
        first_host_block=0,
        slots=(0, BIG.block),
        layers=tuple(range(BIG.layers)),
        parts=(KvPart.KEY, KvPart.VALUE),
    )
    copy(blocks, ring, direction)  # every page is mapped from here on
    began = time.perf_counter()
    copy(blocks, ring, direction)
    return time.perf_counter() - began


async def main(rounds: int, folder: Path) -> None:
    """Print the medians, and what each is of the shared one and the bare passes that it adds."""
    tables = scattered(NUM_BLOCKS)
    ways: Ways = {str(one): partial(pass_s, tables, one) for one in Direction}
    with ExitStack() as agents:
        paths = {
            role: agents.enter_context(agent(role, folder)).attach_path
            for role in (AgentRole.PREFILL, AgentRole.DECODE)
        }
        async with AsyncExitStack() as stack:
            for both in product(MEMORIES, repeat=2):
                engines = [
                    await stack.enter_async_context(engine(paths[role], role, memory))
                    for role, memory in zip(paths, both, strict=True)
                ]
                way = partial(handed_over_s, *engines, tables)
                await way()
                ways = {**ways, " to ".join(both): way}
            seconds = {
                name: median(some) for name, some in (await in_turn(range(rounds), ways)).items()
            }
    for name, some in seconds.items():
        source, _, target = name.partition(" to ")
        limit_s = seconds["shared to shared"]
        limit_s += seconds[Direction.SAVE] * (source == "host")
        limit_s += seconds[Direction.LOAD] * (target == "host")
        told = f", {some / limit_s:.2f} of shared and passes" if target else " a bare pass"
        print(f"{name}: {some * 1e3:.1f} ms{told}")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=20)
with tempfile.TemporaryDirectory(prefix="kvh-") as name:
    anyio.run(main, parser.parse_args().rounds, Path(name))
