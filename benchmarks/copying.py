"""Measures gather and scatter of the packed path, for the shapes that the packed path is for.

Run it from the repository's root: ``python benchmarks/copying.py [box MiB] [torch threads]``.
Every figure is the median in milliseconds of moving all of a share, about 64 MiB (36 with MLA),
one box after the other through a ring of 4 slots; ``ops`` counts torch operations of one box.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbus.geometry import (
    BlockTable,
    Box,
    EngineSpec,
    GroupSpec,
    KvLayout,
    SlotOrder,
    canonical_order,
    lay_out_rank,
    num_blocks_for,
    slot_bytes,
)
from kvbus.memory.copying import Slot, gather, scatter
from kvbus.memory.paged import PagedMemory
from kvbus.planning.boxes import cut_into_boxes, reader_order
from kvbus.planning.mapping import Share

NUM_TOKENS, NUM_LAYERS, REPEATS, NUM_SLOTS = 2048, 16, 9, 4


@dataclass(frozen=True)
class Shape:
    """One side: which of 8 heads its rank has, axis order, block size; ``heads`` 0 means MLA."""

    heads: int = 4
    layout: str = "NHD"
    block_size: int = 16
    cross_layer: bool = False
    segments: int = 1


@dataclass(frozen=True)
class Side:
    """A rank of that shape, and 2,048 tokens in blocks scattered over it."""

    group: GroupSpec
    memory: PagedMemory
    table: BlockTable
    order: SlotOrder


NHD, HND, WIDE, MLA = Shape(), Shape(layout="HND"), Shape(heads=8), Shape(heads=0)
CASES = {
    "NHD, 1 to 2 ranks": (WIDE, NHD),
    "NHD, 2 to 1 ranks": (NHD, WIDE),
    "HND, 1 to 2 ranks": (replace(WIDE, layout="HND"), HND),
    "HND to NHD": (HND, NHD),
    "NHD to HND": (NHD, HND),
    "block 64 to 16": (replace(NHD, block_size=64), NHD),
    "block 16 to 64": (NHD, replace(NHD, block_size=64)),
    "block 48 to 32": (replace(NHD, block_size=48), replace(NHD, block_size=32)),
    "cross-layer to per-layer": (replace(NHD, cross_layer=True), NHD),
    "a segment for each layer": (replace(WIDE, segments=16), replace(NHD, segments=16)),
    "MLA": (MLA, MLA),
}


class Counted(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    num_ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Let it through."""
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def laid_out(shape: Shape) -> Side:
    """Memory for half as many blocks again as the tokens take."""
    layers = tuple(range(NUM_LAYERS))
    group = GroupSpec("full", layers, shape.block_size, 8, 128, "bfloat16")
    if not shape.heads:
        group = GroupSpec("full", layers, shape.block_size, 1, 576, "bfloat16", ("latent",))
    engine = EngineSpec("e", "m", max(1, 8 // (shape.heads or 8)), (group,))
    needed = num_blocks_for(NUM_TOKENS, shape.block_size)
    layout = KvLayout.parse(shape.layout, cross_layer=shape.cross_layer)
    rank = lay_out_rank(engine, 0, layout, num_blocks=needed * 3 // 2)
    regions, size = rank.regions, rank.segments[0].size_bytes
    buffers = {"kv": torch.randint(0, 256, (size,), dtype=torch.uint8)}
    if shape.segments > 1:
        starts = [region.offset_bytes for region in regions]
        pieces = buffers["kv"].split(
            [b - a for a, b in zip(starts, [*starts[1:], size], strict=True)]
        )
        buffers = {str(number): piece.clone() for number, piece in enumerate(pieces)}
        regions = tuple(
            msgspec.structs.replace(region, segment_id=str(number), offset_bytes=0)
            for number, region in enumerate(regions)
        )
    order = reader_order(regions, group)
    assert order
    table = BlockTable.of(torch.randperm(needed * 3 // 2)[:needed].numpy())
    return Side(group, PagedMemory(group, regions, buffers), table, order)


def timed_ms(function: Callable[[], object]) -> float:
    """Median of a few calls after the first."""
    function()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return median(taken) * 1e3


def num_ops(function: Callable[[], object]) -> int:
    """Operations of one call."""
    with Counted() as counted:
        function()
    return counted.num_ops


def measure(name: str, shapes: tuple[Shape, Shape], box_bytes: int) -> None:
    """Print one row of the table."""
    holder, reader = (laid_out(shape) for shape in shapes)
    share = Share(
        0, 0, "full", holder.group.layers, holder.group.parts, 0, 4 if shapes[1].heads else 1
    )
    ring = torch.zeros(NUM_SLOTS * box_bytes, dtype=torch.uint8).split(box_bytes)

    def boxes(order: SlotOrder) -> list[tuple[Box, Slot]]:
        cut = cut_into_boxes(share, reader.group, (0, NUM_TOKENS), order=order, box_bytes=box_bytes)
        return [(box, Slot(ring[n % NUM_SLOTS], order)) for n, box in enumerate(cut)]

    def all_of(copy: Callable[..., int], side: Side, packed: list[tuple[Box, Slot]]) -> float:
        return timed_ms(lambda: [copy(side.memory, side.table, box, slot) for box, slot in packed])

    packed, reordered = boxes(canonical_order()), boxes(reader.order)
    sizes = [slot_bytes(holder.group, box, canonical_order()) for box, _ in packed]
    source = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)

    def memcpy() -> None:
        for number, piece in enumerate(source):
            ring[number % NUM_SLOTS][: piece.numel()].copy_(piece)

    print(
        f"{name:26} {sum(sizes) / 1e6:5.1f} {len(packed):5} {timed_ms(memcpy):8.2f}"
        f"{all_of(gather, holder, packed):8.2f}{all_of(scatter, reader, packed):9.2f}"
        f"{all_of(gather, holder, reordered):10.2f}"
        f"{num_ops(lambda: gather(holder.memory, holder.table, *packed[0])):8}"
        f"{num_ops(lambda: scatter(reader.memory, reader.table, *packed[0])):5}"
    )


def main() -> None:
    """Print the table."""
    box_mib, num_threads = map(int, (sys.argv[1:] + ["8", "1"][len(sys.argv) - 1 :])[:2])
    torch.set_num_threads(num_threads)
    print(f"milliseconds; boxes of {box_mib} MiB, torch threads: {num_threads}")
    columns = "MB boxes   memcpy  gather  scatter  in order   ops: gather, scatter"
    print(f"{columns:>{28 + len(columns)}}")
    for name, shapes in CASES.items():
        measure(name, shapes, box_mib << 20)


if __name__ == "__main__":
    main()
