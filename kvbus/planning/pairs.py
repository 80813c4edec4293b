"""Pairs of regions that share bytes, and the contiguous runs inside one unit.

A pattern holds for every block, as all blocks of a region are alike.

Arrays of offsets have the shape (2, n): row 0 is remote, row 1 is local.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbus.errors import GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, AxisName, Box, EngineSpec, RankSpec, Region
from kvbus.planning.mapping import Share
from kvbus.planning.run_plan import PlacedRank

Offsets = npt.NDArray[np.int64]


class Strides(NamedTuple):
    """Bytes from block to block and from token to token, and tokens in a block, on one side."""

    block_bytes: int
    token_bytes: int
    block_size: int


class Steps(NamedTuple):
    """Bytes from the first index of one axis to each, on either side; local ones ascend."""

    remote: tuple[int, ...]
    local: tuple[int, ...]


class Form(NamedTuple):
    """What pairs of regions have in common when they differ only in where they lie."""

    group: str
    remote: Strides
    local: Strides
    axes: tuple[Steps, ...]
    itemsize: int


class Pair(NamedTuple):
    """Two regions that share layers, parts and heads: the form of what they share, and its corners.

    A corner is the address of block 0, token 0 and the first layer, part, head and dim.
    """

    form: Form
    remote: int
    local: int


class Pattern(NamedTuple):
    """The runs of one unit: tokens in one block on either side.

    Each is at a sum of one ``outer`` and one ``inner`` offset. Outer steps go past a block locally,
    inner ones stay within it. Both ascend locally.
    """

    outer: Offsets
    inner: Offsets
    run_bytes: int

    @property
    def num_runs(self) -> int:
        """Runs of one unit."""
        return int(self.outer.shape[1] * self.inner.shape[1])


RegionOf = Mapping[tuple[str, int, str], Region]
"""The one region of each group, layer and part that a rank holds."""


def regions_by_part(rank: RankSpec) -> RegionOf:
    """As `validate_rank` says, there is only one of each."""
    return {
        (region.group, layer, part): region
        for region in rank.regions
        for layer in region.layers
        for part in region.parts
    }


def held_region(region_of: RegionOf, box: Box, layer: int, part: str) -> Region:
    """The region that has this part of the box; raises `GeometryError` when the rank has none."""
    region = region_of.get((box.group, layer, part))
    if region is None:
        message = f"this rank does not hold layer {layer}, '{part}', of group '{box.group}'"
        raise GeometryError(message, field="layers")
    end, held = box.first_head + box.num_heads, region.first_head + region.num_heads
    if box.first_head < region.first_head or end > held:
        raise GeometryError(
            f"this rank holds heads {region.first_head} to {held} of layer {layer}, '{part}', "
            f"not {box.first_head} to {end}",
            field="first_head",
        )
    return region


def pair_regions(holder: PlacedRank, reader: PlacedRank, share: Share) -> Iterator[Pair]:
    """Every pair of regions of the two ranks that has bytes of ``share`` in common."""
    by_layer: dict[int, list[Region]] = defaultdict(list)
    for region in holder.rank.regions:
        if region.group == share.group:
            for layer in region.layers:
                by_layer[layer].append(region)
    for local in reader.rank.regions:
        if local.group == share.group:
            found = {id(region): region for layer in local.layers for region in by_layer[layer]}
            for remote in found.values():
                yield from _shared(holder, remote, reader, local, share)


def pattern_of(form: Form, num_tokens: int) -> Pattern:
    """The runs of a unit of ``num_tokens`` tokens, from its corner on."""
    token = Steps(
        _strided(range(num_tokens), form.remote.token_bytes),
        _strided(range(num_tokens), form.local.token_bytes),
    )
    axes = [axis for axis in (*form.axes, token) if len(axis.local) > 1]
    run_bytes = form.itemsize
    while (inner := _next_contiguous(axes, run_bytes)) is not None:
        run_bytes *= len(inner.local)
        axes.remove(inner)
    axes.sort(key=lambda axis: axis.local[1], reverse=True)
    num_outer = sum(axis.local[1] >= form.local.block_bytes for axis in axes)
    return Pattern(_sums(axes[:num_outer]), _sums(axes[num_outer:]), run_bytes)


def _shared(
    holder: PlacedRank, remote: Region, reader: PlacedRank, local: Region, share: Share
) -> Iterator[Pair]:
    wanted = set(share.layers)
    layers = [layer for layer in local.layers if layer in wanted and layer in remote.layers]
    parts = [part for part in local.parts if part in share.parts and part in remote.parts]
    if not (layers and parts):
        return
    corners, steps = [], []
    for placed, region in ((holder, remote), (reader, local)):
        first_head = share.first_head - region.first_head
        indices: dict[AxisName, range | tuple[int, ...]] = {
            AxisName.DIM: range(region.size(AxisName.DIM)),
            AxisName.HEAD: range(first_head, first_head + share.num_heads),
            AxisName.KV: tuple(region.parts.index(part) for part in parts),
            AxisName.LAYER: tuple(region.layers.index(layer) for layer in layers),
        }
        offsets = [_from_first(at, region.stride_bytes(axis)) for axis, at in indices.items()]
        base = placed.addresses[region.segment_id] + region.offset_bytes
        corners.append(base + sum(first for first, _ in offsets))
        steps.append([further for _, further in offsets])
    form = Form(
        group=local.group,
        remote=_strides(holder.engine, remote),
        local=_strides(reader.engine, local),
        axes=tuple(map(Steps, *steps)),
        itemsize=DTYPE_SIZES_BYTES[reader.engine.group(local.group).dtype],
    )
    yield Pair(form, *corners)


def _strides(engine: EngineSpec, region: Region) -> Strides:
    return Strides(
        block_bytes=region.stride_bytes(AxisName.BLOCK),
        token_bytes=region.stride_bytes(AxisName.TOKEN),
        block_size=engine.group(region.group).block_size,
    )


@lru_cache(1 << 12)
def _from_first(indices: range | tuple[int, ...], stride_bytes: int) -> tuple[int, tuple[int, ...]]:
    """The offset of the first index, and those of all from there; regions are alike, so cached."""
    offsets = _strided(indices, stride_bytes)
    return offsets[0], tuple(offset - offsets[0] for offset in offsets)


def _strided(indices: Iterable[int], stride_bytes: int) -> tuple[int, ...]:
    return tuple(index * stride_bytes for index in indices)


def _next_contiguous(axes: Iterable[Steps], run_bytes: int) -> Steps | None:
    """The axis that continues a run of ``run_bytes`` without a gap on both sides, if any does."""
    for axis in axes:
        if axis.remote == axis.local == _strided(range(len(axis.local)), run_bytes):
            return axis
    return None


def _sums(axes: Iterable[Steps]) -> Offsets:
    """Every sum of one step of each axis; the first axis is the outermost."""
    sums = np.zeros((2, 1), dtype=np.int64)
    for axis in axes:
        steps = np.array(axis, dtype=np.int64)
        sums = (sums[:, :, None] + steps[:, None, :]).reshape(2, -1)
    return sums
