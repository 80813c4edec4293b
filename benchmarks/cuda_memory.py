"""Measures the path of KV that lies on a GPU: copies to and from slots, and whole handoffs.

Run it from the repository's root, on a machine with an NVIDIA GPU and torch and NIXL for CUDA:
``python benchmarks/cuda_memory.py [MiB of KV]``. Copies are the median of a few, in GB/s of KV,
beside a device-to-device copy of as many bytes. The handoffs are between two agents, each a process
of its own that opens this process's memory, on one GPU.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import anyio
import torch

from kvbus.bench.pairs import agent
from kvbus.engine import Link, RankMemory
from kvbus.errors import SegmentError
from kvbus.geometry import (
    BlockTable,
    EngineSpec,
    GroupSpec,
    KvLayout,
    Tile,
    lay_out_rank,
)
from kvbus.memory.copying import PagedMemory
from kvbus.memory.cuda import GpuMover, check_cuda
from kvbus.planning import Share, cut_into_tiles

REPEATS, BLOCK_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 9, 16, 16, 8, 128
TILE_BYTES = (1 << 20, 8 << 20, 32 << 20)
LAYOUTS = ("NHD", "HND")
ATTACH_TIMEOUT_S = 60.0
LAYERS = tuple(range(NUM_LAYERS))
GROUP = GroupSpec("full", LAYERS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM, "bfloat16")
TOKEN_BYTES = NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM * 2


def timed_s(function: Callable[[], object]) -> float:
    """Median of a few calls after the first, each until the GPU is done."""
    taken = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def all_of(
    copy: Callable[..., None],
    memory: PagedMemory,
    table: BlockTable,
    tiles: tuple[Tile, ...],
    slot: torch.Tensor,
) -> None:
    """Copy one tile after the other through one slot."""
    for tile in tiles:
        copy(memory, table, tile, slot)


def spec(engine_id: str, tp_size: int) -> EngineSpec:
    """An engine of that many ranks."""
    return EngineSpec(engine_id, "benchmark", tp_size, (GROUP,))


def measure_copies(num_tokens: int) -> None:
    """Print gather and scatter of all heads, and of half of them, for each layout and tile size."""
    num_bytes = num_tokens * TOKEN_BYTES
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_s = timed_s(lambda: target.copy_(source))
    print(f"device-to-device copy: {num_bytes / copy_s / 1e9:8.1f} GB/s")
    print("layout heads  tile MiB     gather    scatter  GB/s")
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    for layout in LAYOUTS:
        rank = lay_out_rank(spec("e", 1), 0, KvLayout.parse(layout), num_blocks=num_blocks)
        buffer = torch.zeros(rank.segments[0].size_bytes, dtype=torch.uint8, device="cuda")
        buffers = {rank.segments[0].segment_id: buffer}
        memory = PagedMemory(GROUP, rank.regions, buffers, mover=GpuMover([buffer]))
        table = BlockTable.of(torch.randperm(num_blocks).numpy())
        for num_heads in (NUM_HEADS, NUM_HEADS // 2):
            share = Share(0, 0, "full", LAYERS, GROUP.parts, 0, num_heads)
            for tile_bytes in TILE_BYTES:
                tiles = cut_into_tiles(share, GROUP, (0, num_tokens), tile_bytes=tile_bytes)
                slot = torch.empty(tile_bytes, dtype=torch.uint8, device="cuda")
                rates = [
                    num_bytes * num_heads / NUM_HEADS / timed_s(partial(all_of, *what)) / 1e9
                    for what in [
                        (copy, memory, table, tiles, slot)
                        for copy in (PagedMemory.gather, PagedMemory.scatter)
                    ]
                ]
                print(
                    f"{layout:6} {num_heads:5} {tile_bytes >> 20:8}"
                    + "".join(f"{rate:11.1f}" for rate in rates)
                )


async def measure_handoffs(num_tokens: int, folder: Path) -> None:
    """Print handoffs of all tokens, from one rank to one and to two."""
    with agent("prefill", folder) as prefill_agent, agent("decode", folder) as decode_agent:
        for tp_size in (1, 2):
            specs = spec(f"prefill-{tp_size}", 1), spec(f"decode-{tp_size}", tp_size)
            taken_s = await hand_off(
                specs, (prefill_agent.attach_path, decode_agent.attach_path), num_tokens
            )
            rate = num_tokens * TOKEN_BYTES / taken_s / 1e9
            print(f"handoff 1 to {tp_size} ranks: {taken_s * 1e3:8.2f} ms {rate:8.1f} GB/s")


async def hand_off(
    specs: tuple[EngineSpec, EngineSpec], attach: tuple[Path, Path], num_tokens: int
) -> float:
    """Median seconds of a fetch, from its request to its notice."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    blocks = {"full": torch.randperm(num_blocks).tolist()}
    layout = KvLayout.parse("NHD")
    links = []
    for engine, path in zip(specs, attach, strict=True):
        memory = [
            RankMemory.allocate(engine, rank, layout, num_blocks=num_blocks, device="cuda")
            for rank in range(engine.tp_size)
        ]
        links.append(Link(path, engine, memory=memory, attach_timeout_s=ATTACH_TIMEOUT_S))
    async with links[0] as prefill, links[1] as decode:
        taken = []
        for number in range(REPEATS + 1):
            after = prefill.record()
            offer = await prefill.offer(
                str(number), num_tokens=num_tokens, block_ids=blocks, after=after
            )
            began = time.perf_counter()
            fetch = decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=blocks)
            await fetch.ended
            taken.append(time.perf_counter() - began)
            await offer.ended
    return median(taken[1:])


def main() -> None:
    """Print everything, or why not."""
    try:
        check_cuda()
    except SegmentError as error:
        raise SystemExit(f"error: nothing to measure here: {error.message}") from error
    num_mib = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    num_tokens = (num_mib << 20) // TOKEN_BYTES
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {num_tokens} tokens")
    measure_copies(num_tokens)
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        anyio.run(measure_handoffs, num_tokens, Path(folder))


if __name__ == "__main__":
    main()
