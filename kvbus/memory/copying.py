"""Copies boxes from a rank's blocks into staging slots and back, and zeroes positions of blocks.

Refuses boxes, tables and slots that would reach outside of their memory, before any byte moves.
A call is a few torch operations, which release the GIL, and makes no copy on the way. Give torch
one thread (``torch.set_num_threads(1)``): more of them take turns with whatever else is running.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd
from typing import NamedTuple

import torch

from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    BlockTable,
    Box,
    SlotOrder,
    slot_bytes,
    slot_region,
)
from kvbus.memory.grids import Grid
from kvbus.memory.paged import PagedMemory
from kvbus.memory.tiles import WIDEST_BYTES, TileAxis, units_view, words_of
from kvbus.memory.units import Numbers, SlotSteps, Starts, Units, cut_into_units

LARGE_UNIT_BYTES = 128 << 10
"""Units from here on are scattered one by one; `index_copy_` moves all word by word."""
CONTIGUOUS = SlotSteps(block_bytes=1, token_bytes=1, block_size=1, first_block=0)


@dataclass(frozen=True, slots=True)
class Slot:
    """A staging slot: its bytes as one row of uint8, and the order in which a box lies there.

    The buffer may be larger than the box, which starts at its first byte.
    """

    buffer: torch.Tensor
    order: SlotOrder


class _Move(NamedTuple):
    """Axes of both: [unit, ...]. Unit i of ``slot`` is ``chosen[i]`` of ``rank``; i without it."""

    rank: torch.Tensor
    slot: torch.Tensor
    chosen: Numbers | None


def gather(memory: PagedMemory, table: BlockTable, box: Box, slot: Slot) -> int:
    """Copy ``box`` from the rank's blocks into ``slot``; returns the number of bytes.

    A slot on another device than the rank's is filled in one piece, from one beside the rank.
    Raises `GeometryError` when the rank, the table or the slot does not have all of the box.
    """
    if slot.buffer.device == memory.device:
        return _copy(_gather, memory, table, box=box, slot=slot)
    near = _near(memory, box, slot)
    num_bytes = _copy(_gather, memory, table, box=box, slot=near)
    slot.buffer[: near.buffer.numel()].copy_(near.buffer, non_blocking=True)
    return num_bytes


def scatter(memory: PagedMemory, table: BlockTable, box: Box, slot: Slot) -> int:
    """Copy ``box`` from ``slot`` into the rank's blocks; returns the number of bytes.

    Nothing else in the blocks changes. Slots and errors are as for `gather`.
    """
    if slot.buffer.device == memory.device:
        return _copy(_scatter, memory, table, box=box, slot=slot)
    near = _near(memory, box, slot)
    near.buffer.copy_(slot.buffer[: near.buffer.numel()], non_blocking=True)
    return _copy(_scatter, memory, table, box=box, slot=near)


def zero_positions(memory: PagedMemory, table: BlockTable, start: int, stop: int) -> None:
    """Zero positions [start, stop) of everything that the rank has of the group.

    Raises `GeometryError` when the table does not have them.
    """
    if stop <= start:
        return
    itemsize = DTYPE_SIZES_BYTES[memory.group.dtype]
    pieces = list(cut_into_units(memory.blocks(table, start, stop), CONTIGUOUS, start, stop))
    for grid, num_heads, head_dim in memory.everything():
        offset, address = memory.origin(grid)
        for units in pieces:
            starts = units.in_rank(grid.steps.block_bytes, grid.steps.token_bytes)
            sizes = (grid.layers.num, grid.parts.num, units.num_tokens, num_heads, head_dim)
            axes = tuple(map(TileAxis, sizes, grid.unit_bytes, grid.unit_bytes))
            tile = memory.tile(itemsize, axes, gcd(WIDEST_BYTES, offset, address, *starts[1:3]))
            words = memory.words(grid.steps.segment_id, tile.word_bytes)
            view = units_view(words, offset, starts, shape=tile.shape, strides=tile.rank_strides)
            if starts.chosen is None:
                view.zero_()
            else:
                view.index_fill_(0, _index(starts.chosen, view), 0)


def _copy(
    copy: Callable[[_Move], None],
    memory: PagedMemory,
    table: BlockTable,
    *,
    box: Box,
    slot: Slot,
) -> int:
    moves = list(_moves(memory, table, box, slot))
    for move in moves:
        copy(move)
    return sum(move.slot.numel() * move.slot.itemsize for move in moves)


def _gather(move: _Move) -> None:
    if move.chosen is None:
        move.slot.copy_(move.rank)
    else:
        torch.index_select(move.rank, 0, _index(move.chosen, move.rank), out=move.slot)


def _scatter(move: _Move) -> None:
    if move.chosen is None:
        move.rank.copy_(move.slot)
    elif move.slot[0].nbytes >= LARGE_UNIT_BYTES:
        targets = [move.rank[unit] for unit in move.chosen.tolist()]
        torch._foreach_copy_(targets, list(move.slot.unbind(0)))
    else:
        move.rank.index_copy_(0, _index(move.chosen, move.rank), move.slot)


def _index(chosen: Numbers, of: torch.Tensor) -> torch.Tensor:
    """Indices for a tensor, on its device."""
    index = torch.from_numpy(chosen)
    return index if of.device.type == "cpu" else index.to(of.device)


def _near(memory: PagedMemory, box: Box, slot: Slot) -> Slot:
    """A slot for the box on the rank's device; raises `GeometryError` when it has no room there."""
    needed = _check_room(memory, box, slot)
    buffer = torch.empty(needed, dtype=torch.uint8, device=memory.device)
    return Slot(buffer, slot.order)


def _moves(memory: PagedMemory, table: BlockTable, box: Box, slot: Slot) -> Iterator[_Move]:
    if box.group != memory.group.name:
        raise GeometryError(f"box of group '{box.group}', not '{memory.group.name}'", field="group")
    blocks = memory.blocks(table, box.start, box.stop)
    grids = memory.grids(box.layers, box.parts, (box.first_head, box.first_head + box.num_heads))
    placed = _place(memory, box, slot)
    for units in cut_into_units(blocks, placed.positions, box.start, box.stop):
        in_rank: dict[tuple[int, int], Starts] = {}
        for grid in grids:
            steps = (grid.steps.block_bytes, grid.steps.token_bytes)
            if steps not in in_rank:
                in_rank[steps] = units.in_rank(*steps)
            yield _move(memory, grid, units, starts=in_rank[steps], placed=placed)


class _Placed(NamedTuple):
    """A box in its slot: ``steps`` are bytes along layer, kv, token, head and dim.

    ``words`` gives the slot's storage in words of so many bytes, ``word_bytes`` at most.
    """

    words: Callable[[int], torch.Tensor]
    word_bytes: int
    offset: int
    itemsize: int
    num_heads: int
    head_dim: int
    steps: tuple[int, int, int, int, int]
    positions: SlotSteps


def _place(memory: PagedMemory, box: Box, slot: Slot) -> _Placed:
    region = slot_region(memory.group, box, slot.order)
    _check_room(memory, box, slot)
    steps = {axis.name: axis.stride_bytes for axis in region.axes}
    positions = SlotSteps(
        block_bytes=steps[AxisName.BLOCK],
        token_bytes=steps[AxisName.TOKEN],
        block_size=slot.order.block_size,
        first_block=box.start // slot.order.block_size,
    )
    return _Placed(
        words=lru_cache(None)(partial(words_of, slot.buffer)),
        offset=int(slot.buffer.storage_offset()),
        word_bytes=gcd(WIDEST_BYTES, slot.buffer.data_ptr()),
        itemsize=DTYPE_SIZES_BYTES[memory.group.dtype],
        num_heads=box.num_heads,
        head_dim=region.size(AxisName.DIM),
        steps=(
            steps[AxisName.LAYER],
            steps[AxisName.KV],
            positions.step_bytes,
            steps[AxisName.HEAD],
            steps[AxisName.DIM],
        ),
        positions=positions,
    )


def _check_room(memory: PagedMemory, box: Box, slot: Slot) -> int:
    """How many bytes of the slot the box takes; raises `GeometryError` when they are not there."""
    needed = slot_bytes(memory.group, box, slot.order)
    if needed > slot.buffer.numel():
        raise GeometryError(
            f"box takes {needed} bytes, its staging slot has {slot.buffer.numel()}",
            needed_bytes=needed,
            given_bytes=slot.buffer.numel(),
        )
    return needed


def _move(
    memory: PagedMemory, grid: Grid, units: Units, *, starts: Starts, placed: _Placed
) -> _Move:
    sizes = (
        grid.layers.num,
        grid.parts.num,
        units.num_tokens,
        placed.num_heads,
        placed.head_dim,
    )
    axes = tuple(map(TileAxis, sizes, grid.unit_bytes, placed.steps))
    offset, address = memory.origin(grid)
    corner = (
        placed.offset + grid.layers.first * placed.steps[0] + grid.parts.first * placed.steps[1]
    )
    in_slot = units.in_slot
    word = gcd(placed.word_bytes, offset, address, corner, *starts[1:3], *in_slot[1:3])
    tile = memory.tile(placed.itemsize, axes, word)
    rank = memory.words(grid.steps.segment_id, tile.word_bytes)
    return _Move(
        units_view(rank, offset, starts, shape=tile.shape, strides=tile.rank_strides),
        units_view(
            placed.words(tile.word_bytes),
            corner,
            in_slot,
            shape=tile.shape,
            strides=tile.slot_strides,
        ),
        starts.chosen,
    )
