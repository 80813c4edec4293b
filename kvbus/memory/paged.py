"""Paged memory: one group's regions on one rank, and the buffers that they lie in."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial

import torch

from kvbus.errors import GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, AxisName, BlockTable, GroupSpec, Region
from kvbus.memory.grids import Grid, find_grids, map_regions
from kvbus.memory.tiles import tile_of, words_of
from kvbus.memory.units import RankBlocks, rank_blocks

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
        self._buffers = dict(buffers)
        self._num_blocks = min((region.size(AxisName.BLOCK) for region in own), default=0)
        self._layers = tuple(sorted({layer for layer, _ in region_of}))
        self._parts: dict[tuple[int, int, int], tuple[str, ...]] = {}
        for region in own:
            shape = (region.first_head, region.num_heads, region.size(AxisName.DIM))
            parts = self._parts.get(shape, ()) + region.parts
            self._parts[shape] = tuple(dict.fromkeys(parts))
        self.grids = lru_cache(MAX_CACHED)(partial(find_grids, region_of))
        """See `find_grids`."""
        self.tile = lru_cache(MAX_CACHED)(tile_of)
        """See `tile_of`."""
        self._words = lru_cache(None)(partial(_words, self._buffers))

    def everything(self) -> Iterator[tuple[Grid, int, int]]:
        """All that the rank has: grids, each with its number of heads and head size."""
        for (first_head, num_heads, head_dim), parts in self._parts.items():
            heads = (first_head, first_head + num_heads)
            for grid in self.grids(self._layers, parts, heads):
                yield grid, num_heads, head_dim

    def blocks(self, table: BlockTable, start: int, stop: int) -> RankBlocks:
        """The blocks of positions [start, stop); raises `GeometryError` for a wrong table."""
        return rank_blocks(
            table, start, stop, block_size=self.group.block_size, num_blocks=self._num_blocks
        )

    def origin(self, grid: Grid) -> tuple[int, int]:
        """Where the grid starts in its buffer's storage, and in this process."""
        buffer = self._buffers[grid.steps.segment_id]
        offset = int(buffer.storage_offset()) + grid.origin_bytes
        return offset, buffer.data_ptr() + grid.origin_bytes

    def words(self, segment_id: str, word_bytes: int) -> torch.Tensor:
        """The storage of a segment's buffer as words: see `words_of`."""
        return self._words(segment_id, word_bytes)


def _words(buffers: Mapping[str, torch.Tensor], segment_id: str, word_bytes: int) -> torch.Tensor:
    return words_of(buffers[segment_id], word_bytes)


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
