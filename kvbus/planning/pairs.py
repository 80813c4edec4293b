"""Pairs of regions that share bytes, and the contiguous runs inside one piece of a block.

Refuses to know block tables: a pattern holds for every block, as all blocks of a region are alike.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbus.geometry import DTYPE_SIZES_BYTES, AxisName, EngineSpec, RankSpec, Region

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedRank:
    """A rank of an engine, and the address at which its agent has mapped each segment."""

    engine: EngineSpec
    rank: RankSpec
    addresses: Mapping[str, int]


class Strides(NamedTuple):
    """Bytes from block to block and from token to token, and tokens in a block, on one side."""

    block_bytes: int
    token_bytes: int
    block_size: int


class Pair(NamedTuple):
    """Two regions that share layers, parts and heads.

    ``axes`` are the offsets of the shared box, remote and local, innermost meaning first; each
    array starts at the box's own first index, so that their first elements add up to its corner.
    """

    group: str
    remote: Strides
    local: Strides
    remote_base: int
    local_base: int
    axes: tuple[tuple[Offsets, Offsets], ...]
    itemsize: int


class Pattern(NamedTuple):
    """Runs of one piece of ``n`` tokens that starts at token 0 of block 0; each of shape (runs,).

    ``remote`` and ``local`` are addresses, ``num_bytes`` the length of each run.
    """

    remote: Offsets
    local: Offsets
    num_bytes: Offsets


def pair_regions(holder: PlacedRank, reader: PlacedRank) -> Iterator[Pair]:
    """Every pair of regions of the two ranks that has bytes in common."""
    for local in reader.rank.regions:
        for remote in holder.rank.regions:
            if remote.group == local.group:
                yield from _shared(holder, remote, reader, local)


def pattern_of(pairs: Iterable[Pair], num_tokens: int) -> Pattern:
    """The runs that all ``pairs`` need for a piece of ``num_tokens`` tokens within a block."""
    runs = [_runs(pair, num_tokens) for pair in pairs]
    return Pattern(*(np.concatenate(column) for column in zip(*runs, strict=True)))


def _shared(
    holder: PlacedRank, remote: Region, reader: PlacedRank, local: Region
) -> Iterator[Pair]:
    group = reader.engine.group(local.group)
    layers = [layer for layer in local.layers if layer in remote.layers]
    parts = [part for part in local.parts if part in remote.parts]
    heads = range(
        max(local.first_head, remote.first_head),
        min(local.first_head + local.num_heads, remote.first_head + remote.num_heads),
    )
    if not (layers and parts and heads):
        return

    def box(region: Region) -> tuple[Offsets, ...]:
        return (
            _steps(region, AxisName.DIM, range(group.head_dim)),
            _steps(region, AxisName.HEAD, [head - region.first_head for head in heads]),
            _steps(region, AxisName.KV, [region.parts.index(part) for part in parts]),
            _steps(region, AxisName.LAYER, [region.layers.index(layer) for layer in layers]),
        )

    yield Pair(
        group=local.group,
        remote=_strides(holder.engine, remote),
        local=_strides(reader.engine, local),
        remote_base=holder.addresses[remote.segment_id] + remote.offset_bytes,
        local_base=reader.addresses[local.segment_id] + local.offset_bytes,
        axes=tuple(zip(box(remote), box(local), strict=True)),
        itemsize=DTYPE_SIZES_BYTES[group.dtype],
    )


def _strides(engine: EngineSpec, region: Region) -> Strides:
    return Strides(
        block_bytes=region.stride_bytes(AxisName.BLOCK),
        token_bytes=region.stride_bytes(AxisName.TOKEN),
        block_size=engine.group(region.group).block_size,
    )


def _steps(region: Region, axis: AxisName, indices: Iterable[int]) -> Offsets:
    return np.fromiter(indices, dtype=np.int64) * region.stride_bytes(axis)


def _runs(pair: Pair, num_tokens: int) -> tuple[Offsets, Offsets, Offsets]:
    tokens = np.arange(num_tokens, dtype=np.int64)
    token_axis = (tokens * pair.remote.token_bytes, tokens * pair.local.token_bytes)
    axes = [axis for axis in (*pair.axes, token_axis) if axis[0].size > 1]
    run_bytes = pair.itemsize
    while (inner := _next_contiguous(axes, run_bytes)) is not None:
        run_bytes *= axes.pop(inner)[0].size
    remote = np.array([pair.remote_base + sum(int(axis[0]) for axis, _ in pair.axes)])
    local = np.array([pair.local_base + sum(int(axis[0]) for _, axis in pair.axes)])
    for remote_steps, local_steps in axes:
        remote = ((remote_steps - remote_steps[0])[:, None] + remote[None, :]).ravel()
        local = ((local_steps - local_steps[0])[:, None] + local[None, :]).ravel()
    return remote, local, np.full(remote.size, run_bytes, dtype=np.int64)


def _next_contiguous(axes: list[tuple[Offsets, Offsets]], run_bytes: int) -> int | None:
    """The axis that continues a run of ``run_bytes`` without a gap on both sides, if any does."""
    for number, (remote, local) in enumerate(axes):
        wanted = np.arange(remote.size, dtype=np.int64) * run_bytes
        if np.array_equal(remote - remote[0], wanted) and np.array_equal(local - local[0], wanted):
            return number
    return None
