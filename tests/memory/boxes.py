"""Random boxes that two ranks of different shapes hold, and copying them index by index.

Refuses strides other than through `byte_offset`, the plain meaning of a region.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    BlockTable,
    Box,
    GroupSpec,
    RankSpec,
    Region,
    SlotOrder,
    canonical_order,
    num_blocks_for,
    slot_bytes,
    slot_region,
)
from kvbus.memory import PagedMemory, Slot, copying, scatter
from tests.geometry.layouts import Element, byte_offset, engines, group_specs, ranks

Where = Mapping[Any, tuple[str, int]]
"""Segment and byte of each element, by what the element means."""


@dataclass(frozen=True)
class Side:
    """One rank of an engine, its buffers, and a request's blocks."""

    group: GroupSpec
    rank: RankSpec
    buffers: Mapping[str, torch.Tensor]
    table: BlockTable

    @property
    def memory(self) -> PagedMemory:
        return PagedMemory(self.group, self.rank.regions, self.buffers)

    def bytes(self) -> dict[str, bytes]:
        return {name: buffer.numpy().tobytes() for name, buffer in self.buffers.items()}


@dataclass(frozen=True)
class Case:
    prefill: Side
    decode: Side
    box: Box
    slot: Slot
    large_unit_bytes: int

    def scatter(self) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copying, "LARGE_UNIT_BYTES", self.large_unit_bytes)
            return scatter(self.decode.memory, self.decode.table, self.box, self.slot)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two ranks of a group, and a box that both of them hold."""
    groups = draw(group_specs())
    head_dim = draw(st.sampled_from([1, 2, 3, 8, 16]))
    groups = tuple(msgspec.structs.replace(group, head_dim=head_dim) for group in groups)
    start = draw(st.integers(0, 9))
    stop = start + draw(st.integers(1, 12))
    prefill, decode = (draw(_sides(groups, start, stop)) for _ in range(2))
    box = _common_box(draw, prefill, decode, start, stop)
    if box is None:
        decode = prefill
        box = _common_box(draw, prefill, decode, start, stop)
    assert box
    order = draw(_orders())
    size = slot_bytes(prefill.group, box, order) + draw(st.integers(0, 3))
    slot = Slot(draw(_buffers(size)), order)
    return Case(prefill, decode, box, slot, draw(st.sampled_from([1, 1 << 30])))


def _orders() -> st.SearchStrategy[SlotOrder]:
    others = st.builds(SlotOrder, st.permutations(list(AxisName)).map(tuple), st.integers(1, 6))
    return st.one_of(st.just(canonical_order()), others)


def _common_box(draw: st.DrawFn, one: Side, two: Side, start: int, stop: int) -> Box | None:
    group = one.group
    layers = draw(st.permutations(group.layers))[: draw(st.integers(1, len(group.layers)))]
    parts = draw(st.permutations(group.parts))[: draw(st.integers(1, len(group.parts)))]
    held = [held_heads_of(side) for side in (one, two)]
    heads = range(max(h.start for h in held), min(h.stop for h in held))
    if not heads:
        return None
    first = draw(st.sampled_from(heads))
    num_heads = draw(st.integers(1, heads.stop - first))
    return Box(group.name, tuple(layers), tuple(parts), first, num_heads, start, stop)


def held_heads_of(side: Side) -> range:
    region = next(region for region in side.rank.regions if region.group == side.group.name)
    return range(region.first_head, region.first_head + region.num_heads)


@st.composite
def _sides(draw: st.DrawFn, groups: tuple[GroupSpec, ...], start: int, stop: int) -> Side:
    engine = draw(engines(groups, tp_size=1))
    group = engine.groups[0]
    first = max(0, start // group.block_size - draw(st.integers(0, 1)))
    count = num_blocks_for(stop, group.block_size) - first + draw(st.integers(0, 1))
    num_blocks = count + draw(st.integers(0, 2))
    ids = draw(st.one_of(st.permutations(range(num_blocks)), st.just(range(num_blocks))))
    rank = draw(ranks(engine, 0, num_blocks=num_blocks))
    buffers = {one.segment_id: draw(_buffers(one.size_bytes)) for one in rank.segments}
    return Side(group, rank, buffers, BlockTable.of(list(ids)[:count], first_block=first))


@st.composite
def _buffers(draw: st.DrawFn, size_bytes: int) -> torch.Tensor:
    """Random bytes somewhere in a larger storage."""
    before = draw(st.sampled_from([0, 16, 8, 3]))
    seed = draw(st.integers(0, 255))
    content = np.random.default_rng(seed).integers(0, 256, before + size_bytes + 5, np.uint8)
    return torch.from_numpy(content)[before : before + size_bytes]


def where(
    regions: tuple[Region, ...], table: BlockTable, box: Box, block_size: int, dim: int
) -> Where:
    """Every element of ``box``, looked up index by index."""
    found = {}
    places = {(layer, part): r for r in regions for layer in r.layers for part in r.parts}
    for position in range(box.start, box.stop):
        block = int(table.array()[position // block_size - table.first_block])
        for layer in box.layers:
            for part in box.parts:
                region = places[layer, part]
                for head in range(box.first_head, box.first_head + box.num_heads):
                    for at in range(dim):
                        element = Element(block, layer, part, position % block_size, head, at)
                        key = (layer, part, position, head, at)
                        found[key] = (region.segment_id, byte_offset(region, element))
    return found


def in_rank(side: Side, box: Box) -> Where:
    regions = tuple(r for r in side.rank.regions if r.group == box.group)
    dim = side.group.part_shape(box.parts[0]).head_dim
    return where(regions, side.table, box, side.group.block_size, dim)


def in_slot(group: GroupSpec, box: Box, order: SlotOrder) -> Where:
    first = box.start // order.block_size
    blocks = range(num_blocks_for(box.stop, order.block_size) - first)
    table = BlockTable.of(list(blocks), first_block=first)
    dim = group.part_shape(box.parts[0]).head_dim
    region = slot_region(group, box, order)
    return where((region,), table, box, order.block_size, dim)


def copied_by_loops(
    source: Mapping[str, bytes],
    out_of: Where,
    target: Mapping[str, bytes],
    into: Where,
    itemsize: int,
) -> dict[str, bytes]:
    """The target's memory afterwards."""
    after = {name: bytearray(content) for name, content in target.items()}
    for meaning, (segment, at) in into.items():
        from_segment, start = out_of[meaning]
        after[segment][at : at + itemsize] = source[from_segment][start : start + itemsize]
    return {name: bytes(content) for name, content in after.items()}


def slot_content(slot: Slot) -> dict[str, bytes]:
    return {"slot": slot.buffer.numpy().tobytes()}


def itemsize_of(group: GroupSpec) -> int:
    return DTYPE_SIZES_BYTES[group.dtype]
