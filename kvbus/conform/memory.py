"""KV in an engine's memory, by position: axes position, layer, part, head, dim, byte.

Byte `i` of the row of one head, layer, part and position is

    (101 * NAME + 59 * layer + 37 * part + 7 * position + 23 * head + 3 * i) modulo 251

NAME is the request's name, `part` the index in the group's `parts`. Layers and heads are global.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    BlockTable,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
)

Bytes = npt.NDArray[np.uint8]
Segments = Mapping[str, mmap.mmap | None]
_ORDER = (
    AxisName.BLOCK,
    AxisName.TOKEN,
    AxisName.LAYER,
    AxisName.KV,
    AxisName.HEAD,
    AxisName.DIM,
)
_MODULUS = 251


@dataclass(frozen=True, slots=True)
class RegionView:
    """``view`` has the axes block, token, layer, part, head, dim, byte."""

    rank: int
    group: GroupSpec
    region: Region
    view: Bytes

    def read(self, table: BlockTable, start: int, stop: int) -> Bytes:
        copied: Bytes = self.view[self._slots(table, start, stop)]
        return copied

    def write(self, table: BlockTable, start: int, kv: Bytes) -> None:
        self.view[self._slots(table, start, start + len(kv))] = kv

    def numbers(self, name: int, start: int, stop: int) -> Bytes:
        shape = self.view.shape
        parts = [self.group.parts.index(part) for part in self.region.parts]
        row = np.arange(shape[5] * shape[6]).reshape(shape[5:])
        sums = (
            101 * name
            + 7 * np.arange(start, stop)[:, None, None, None, None, None]
            + 59 * np.array(self.region.layers)[:, None, None, None, None]
            + 37 * np.array(parts)[:, None, None, None]
            + 23 * (self.region.first_head + np.arange(shape[4]))[:, None, None]
            + 3 * row
        )
        numbers: Bytes = (sums % _MODULUS).astype(np.uint8)
        return numbers

    def difference(self, have: Bytes, want: Bytes, start: int) -> str:
        differs = np.argwhere(have != want)
        if not len(differs):
            return ""
        position, layer, part, head, dim, byte = (int(index) for index in differs[0])
        is_, be = have[tuple(differs[0])], want[tuple(differs[0])]
        return (
            f"rank {self.rank}, group {self.group.name}, layer {self.region.layers[layer]}, "
            f"{self.region.parts[part]}, position {start + position}, head "
            f"{self.region.first_head + head}, dim {dim}, byte {byte}: {is_} instead of {be}; "
            f"{len(differs):,} of {have.size:,} bytes differ"
        )

    def _slots(self, table: BlockTable, start: int, stop: int) -> tuple[npt.NDArray[np.int64], ...]:
        positions = np.arange(start, stop)
        entries = positions // self.group.block_size - table.first_block
        return table.array().astype(np.int64)[entries], positions % self.group.block_size


@dataclass(frozen=True, slots=True)
class LiveCell:
    page: memoryview
    number: int
    value: int

    @property
    def is_open(self) -> bool:
        return bool(self.page[self.number] == self.value)


def places_of(engine: EngineSpec, rank: RankSpec, segments: Segments) -> list[RegionView]:
    return [
        RegionView(rank.rank, group, region, _view(group, region, segment))
        for region in rank.regions
        if (segment := segments[region.segment_id]) and (group := engine.group(region.group))
    ]


def covered(
    places: Iterable[RegionView],
    tables: Mapping[str, BlockTable],
    first_token: int,
    num_tokens: int,
) -> Iterator[tuple[RegionView, BlockTable, int, int]]:
    for place in places:
        start, stop = place.group.positions(first_token, num_tokens)
        if stop > start and place.group.name in tables:
            yield place, tables[place.group.name], start, stop


def _view(group: GroupSpec, region: Region, segment: mmap.mmap) -> Bytes:
    itemsize = DTYPE_SIZES_BYTES[group.dtype]
    shape = tuple(region.size(name) for name in _ORDER)
    strides = tuple(region.stride_bytes(name) for name in _ORDER)
    base = np.frombuffer(segment, dtype=np.uint8)[region.offset_bytes :]
    view: Bytes = np.lib.stride_tricks.as_strided(base, (*shape, itemsize), (*strides, 1))
    return view
