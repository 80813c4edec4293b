"""Copies boxes from a rank's blocks into staging slots and back, and zeroes positions of blocks.

Refuses boxes, tables and slots that would reach outside of their memory, before any byte moves.
A call is a few torch operations, which release the GIL, and makes no copy on the way. Give torch
one thread, see `copy_on_one_thread`: more of them take turns with whatever else is running.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import gcd
from typing import NamedTuple

import torch

from kvbus.errors import GeometryError
from kvbus.geometry import (
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


def copy_on_one_thread() -> None:
    """Let torch do every operation, of any thread, in the thread that calls it.

    Its own threads wait for each other. On 2 cores with something else running, a copy by two
    of them took 8 ms instead of 0.2.
    """
    torch.set_num_threads(1)


def gather(memory: PagedMemory, table: BlockTable, box: Box, slot: Slot) -> int:
    """Copy ``box`` from the rank's blocks into ``slot``; returns the number of bytes.

    A slot on another device than the rank's is filled in one piece, from one beside the rank.
    Raises `GeometryError` when the rank, the table or the slot does not have all of the box.
    """
    near = _near(memory, box, slot)
    moves = list(_moves(memory, table, box, near))
    for move in moves:
        if move.chosen is None:
            move.slot.copy_(move.rank)
        else:
            torch.index_select(move.rank, 0, _index(move.chosen, move.rank), out=move.slot)
    if near is not slot:
        slot.buffer[: near.buffer.numel()].copy_(near.buffer, non_blocking=True)
    return sum(move.slot.nbytes for move in moves)


def scatter(memory: PagedMemory, table: BlockTable, box: Box, slot: Slot) -> int:
    """Copy ``box`` from ``slot`` into the rank's blocks; returns the number of bytes.

    Nothing else in the blocks changes. Slots and errors are as for `gather`.
    """
    near = _near(memory, box, slot)
    if near is not slot:
        near.buffer.copy_(slot.buffer[: near.buffer.numel()], non_blocking=True)
    moves = list(_moves(memory, table, box, near))
    for move in moves:
        if move.chosen is None:
            move.rank.copy_(move.slot)
        elif move.slot[0].nbytes >= LARGE_UNIT_BYTES:
            targets = [move.rank[unit] for unit in move.chosen.tolist()]
            torch._foreach_copy_(targets, list(move.slot.unbind(0)))
        else:
            move.rank.index_copy_(0, _index(move.chosen, move.rank), move.slot)
    return sum(move.slot.nbytes for move in moves)


def zero_positions(memory: PagedMemory, table: BlockTable, start: int, stop: int) -> None:
    """Zero positions [start, stop) of everything that the rank has of the group.

    Raises `GeometryError` when the table does not have them.
    """
    if stop <= start:
        return
    memory.check_blocks(table, start, stop)
    block_size = memory.group.block_size
    pieces = list(cut_into_units(table, CONTIGUOUS, start, stop, block_size=block_size))
    for grid, num_heads, head_dim in memory.everything():
        for units in pieces:
            starts = units.in_rank(grid.steps.block_bytes, grid.steps.token_bytes)
            sizes = (grid.layers.num, grid.parts.num, units.num_tokens, num_heads, head_dim)
            axes = tuple(map(TileAxis, sizes, grid.unit_bytes, grid.unit_bytes))
            tile = memory.tile(axes, memory.alignment(grid, starts))
            view = memory.view(grid, starts, tile)
            if starts.chosen is None:
                view.zero_()
            else:
                view.index_fill_(0, _index(starts.chosen, view), 0)


def _index(chosen: Numbers, of: torch.Tensor) -> torch.Tensor:
    """Indices for a tensor, on its device."""
    index = torch.from_numpy(chosen)
    return index if of.device.type == "cpu" else index.to(of.device)


def _near(memory: PagedMemory, box: Box, slot: Slot) -> Slot:
    """The slot, or one for the box on the rank's device; `GeometryError` when it has no room."""
    if slot.buffer.device == memory.device:
        return slot
    needed = _check_room(memory, box, slot)
    buffer = torch.empty(needed, dtype=torch.uint8, device=memory.device)
    return Slot(buffer, slot.order)


class _Placed(NamedTuple):
    """A box in its slot: ``steps`` are bytes along layer, kv, token, head and dim.

    ``words`` gives the slot's storage in words of so many bytes, ``alignment`` at most.
    """

    words: Callable[[int], torch.Tensor]
    alignment: int
    offset: int
    inner_sizes: tuple[int, int]
    steps: tuple[int, int, int, int, int]
    positions: SlotSteps


def _moves(memory: PagedMemory, table: BlockTable, box: Box, slot: Slot) -> Iterator[_Move]:
    if box.group != memory.group.name:
        raise GeometryError(f"box of group '{box.group}', not '{memory.group.name}'", field="group")
    memory.check_blocks(table, box.start, box.stop)
    grids = memory.grids(box.layers, box.parts, (box.first_head, box.first_head + box.num_heads))
    placed, size = _place(memory, box, slot), memory.group.block_size
    for units in cut_into_units(table, placed.positions, box.start, box.stop, block_size=size):
        in_rank: dict[tuple[int, int], Starts] = {}
        for grid in grids:
            steps = (grid.steps.block_bytes, grid.steps.token_bytes)
            if steps not in in_rank:
                in_rank[steps] = units.in_rank(*steps)
            yield _move(memory, grid, units, starts=in_rank[steps], placed=placed)


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
        words=cache(partial(words_of, slot.buffer)),
        alignment=gcd(WIDEST_BYTES, slot.buffer.data_ptr()),
        offset=int(slot.buffer.storage_offset()),
        inner_sizes=(box.num_heads, region.size(AxisName.DIM)),
        steps=(
            steps[AxisName.LAYER],
            steps[AxisName.KV],
            positions.step_bytes,
            steps[AxisName.HEAD],
            steps[AxisName.DIM],
        ),
        positions=positions,
    )


def _move(
    memory: PagedMemory, grid: Grid, units: Units, *, starts: Starts, placed: _Placed
) -> _Move:
    sizes = (grid.layers.num, grid.parts.num, units.num_tokens, *placed.inner_sizes)
    axes = tuple(map(TileAxis, sizes, grid.unit_bytes, placed.steps))
    layer_bytes, part_bytes = placed.steps[:2]
    corner = placed.offset + grid.layers.first * layer_bytes + grid.parts.first * part_bytes
    in_slot = units.in_slot
    alignment = gcd(placed.alignment, corner, in_slot.first_bytes, in_slot.step_bytes)
    tile = memory.tile(axes, gcd(alignment, memory.alignment(grid, starts)))
    words = placed.words(tile.word_bytes)
    return _Move(
        memory.view(grid, starts, tile),
        units_view(words, corner, in_slot, shape=tile.shape, strides=tile.slot_strides),
        starts.chosen,
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
