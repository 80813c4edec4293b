"""Paged memory: one group's regions on one rank, and the buffers that they lie in."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from math import gcd

import torch

from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    BlockTable,
    GroupSpec,
    Region,
    num_blocks_for,
)
from kvbus.memory.grids import Grid, find_grids, map_regions
from kvbus.memory.tiles import WIDEST_BYTES, Tile, tile_of, units_view, words_of
from kvbus.memory.units import Starts

MAX_CACHED = 1024


class PagedMemory:
    """The memory of one group on one rank; several threads may use it at once.

    ``buffers`` are the rank's segments, each one row of uint8. ``regions`` are of a rank that
    `validate_rank` has passed; those of other groups are left out. Raises `GeometryError` for a
    region whose buffer is missing or too small.
    """

    def __init__(
        self, group: GroupSpec, regions: Iterable[Region], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        own = [region for region in regions if region.group == group.name]
        for region in own:
            _check_extent(region, DTYPE_SIZES_BYTES[group.dtype], buffers)
        region_of = map_regions(own)
        self.group = group
        self.device = next(
            (buffers[region.segment_id].device for region in own), torch.device("cpu")
        )
        """Where the memory is; all of it is in one place."""
        self._at = {
            name: (int(buffer.storage_offset()), buffer.data_ptr())
            for name, buffer in buffers.items()
        }
        self._num_blocks = min((region.size(AxisName.BLOCK) for region in own), default=0)
        self._layers = tuple(sorted({layer for layer, _ in region_of}))
        self._parts: dict[tuple[int, int, int], tuple[str, ...]] = {}
        for region in own:
            shape = (region.first_head, region.num_heads, region.size(AxisName.DIM))
            parts = self._parts.get(shape, ()) + region.parts
            self._parts[shape] = tuple(dict.fromkeys(parts))
        self.grids = lru_cache(MAX_CACHED)(partial(find_grids, region_of))
        """See `find_grids`."""
        self.tile = lru_cache(MAX_CACHED)(partial(tile_of, DTYPE_SIZES_BYTES[group.dtype]))
        """See `tile_of`."""
        self._words = lru_cache(None)(lambda name, size: words_of(buffers[name], size))

    def everything(self) -> Iterator[tuple[Grid, int, int]]:
        """All that the rank has: grids, each with its number of heads and head size."""
        for (first_head, num_heads, head_dim), parts in self._parts.items():
            heads = (first_head, first_head + num_heads)
            for grid in self.grids(self._layers, parts, heads):
                yield grid, num_heads, head_dim

    def check_blocks(self, table: BlockTable, start: int, stop: int) -> None:
        """Raise `GeometryError` unless ``table`` has positions [start, stop), in blocks of here."""
        first = start // self.group.block_size
        last = num_blocks_for(stop, self.group.block_size)
        skipped = first - table.first_block
        ids = table.array()[max(skipped, 0) : last - table.first_block]
        if skipped < 0 or ids.size < last - first:
            raise GeometryError(
                f"positions {start} to {stop} are in blocks {first} to {last}, the table has "
                f"{len(table)} from block {table.first_block} on",
                needed=last,
                given=table.first_block + len(table),
            )
        if ids.size and int(ids.max()) >= self._num_blocks:
            raise GeometryError(
                f"block id {int(ids.max())} is out of range, the cache has {self._num_blocks} "
                "blocks",
                block_id=int(ids.max()),
                num_blocks=self._num_blocks,
            )

    def alignment(self, grid: Grid, starts: Starts) -> int:
        """Bytes of the widest word at which all units of the grid start."""
        offset, address = self._at[grid.steps.segment_id]
        origin = grid.origin_bytes
        return gcd(WIDEST_BYTES, offset + origin, address + origin, *starts[1:3])

    def view(self, grid: Grid, starts: Starts, tile: Tile) -> torch.Tensor:
        """The units of the grid, in words of the tile: [unit, *tile.shape]."""
        offset = self._at[grid.steps.segment_id][0] + grid.origin_bytes
        words = self._words(grid.steps.segment_id, tile.word_bytes)
        return units_view(words, offset, starts, shape=tile.shape, strides=tile.rank_strides)


def _check_extent(region: Region, itemsize: int, buffers: Mapping[str, torch.Tensor]) -> None:
    given = buffers[region.segment_id].numel() if region.segment_id in buffers else 0
    reach = sum((axis.size - 1) * axis.stride_bytes for axis in region.axes)
    needed = region.offset_bytes + reach + itemsize
    if needed > given:
        raise GeometryError(
            f"a region of group '{region.group}' ends at byte {needed} of segment "
            f"'{region.segment_id}', which has {given}",
            needed_bytes=needed,
            given_bytes=given,
        )
