"""What every byte of an offer must be: a pure function of (offer, layer, part, head, token).

Refuses to ask kvbus where a byte lies: positions are looked up in the tables that the engine gave.
Axes of a view: block, token (of a block), head, dim; rows are [token, head, dim], as raw bits.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbus.engine import KvCache
from kvbus.geometry import EngineSpec, GroupSpec
from tests.expected import moved, positions
from tests.strict_sessions import bits

CANARY_BYTE = 0xA5
WORD_BYTES = 8
STEPS = tuple(
    np.array([step], dtype=np.uint64)
    for step in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
NUMPY_BITS = {torch.uint8: np.uint8, torch.int16: np.int16}

Blocks = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class View:
    """One part of one layer on one rank, as bits, and the global heads that it holds."""

    group: GroupSpec
    layer: int
    part: str
    heads: range
    bits: Tensor


def views_of(spec: EngineSpec, caches: Sequence[KvCache]) -> list[View]:
    """All of an engine's cache."""
    return list(_views(spec, caches))


def _views(spec: EngineSpec, caches: Sequence[KvCache]) -> Iterator[View]:
    for cache in caches:
        for region in cache.rank.regions:
            heads = range(region.first_head, region.first_head + region.num_heads)
            for layer in region.layers:
                for part in region.parts:
                    view = bits(cache.view(layer, part))
                    yield View(spec.group(region.group), layer, part, heads, view)


def rows(offer: int, view: View, tokens: range) -> Tensor:
    """What these tokens have in this view: [token, head, dim]."""
    name = zlib.crc32(f"{offer}/{view.layer}/{view.part}".encode())
    width = view.bits.shape[3] * view.bits.itemsize
    token = np.arange(tokens.start, tokens.stop, dtype=np.uint64)[:, None, None] * STEPS[0]
    head = np.arange(view.heads.start, view.heads.stop, dtype=np.uint64)[None, :, None] * STEPS[1]
    word = np.arange(width // WORD_BYTES, dtype=np.uint64)[None, None, :] * STEPS[2]
    mixed = np.uint64(name) + token + head + word
    mixed ^= mixed >> np.uint64(29)
    mixed *= STEPS[3]
    mixed ^= mixed >> np.uint64(32)
    return torch.from_numpy(mixed.view(NUMPY_BITS[view.bits.dtype]))


def fill(offer: int, views: Sequence[View], blocks: Blocks, first: int, stop: int) -> None:
    """Compute tokens [first, stop) of an offer into ``blocks``, whose tables start at token 0."""
    for view in views:
        size = view.group.block_size
        tokens = range(first, stop)
        ids, slots = _places(tokens, blocks[view.group.name], size, 0)
        view.bits[ids, slots] = rows(offer, view, tokens)


def expected(
    offer: int,
    view: View,
    blocks: Sequence[int],
    *,
    holder: EngineSpec | None,
    first: int,
    stop: int,
    zero_tail: bool,
) -> Tensor:
    """All of ``blocks`` after a fetch: what was moved, and the canary everywhere else.

    Without a ``holder`` only what the tokens need was, by way of host blocks.
    """
    want = canary_like(view.bits[: len(blocks)])
    tokens, size = positions(view.group, first, stop), view.group.block_size
    if holder is not None:
        tokens = moved(view.group, holder.group(view.group.name), first, stop)
    if tokens:
        ids, slots = _places(tokens, range(len(blocks)), size, tokens.start // size)
        want[ids, slots] = rows(offer, view, tokens)
        if zero_tail and stop % size:
            want[-1, stop % size :] = 0
    return want


def num_wrong_bytes(one: Tensor, other: Tensor) -> int:
    """How many bytes differ; most often none, which is quick to see."""
    if torch.equal(one, other):
        return 0
    return int((one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).sum())


def canary_like(tensor: Tensor) -> Tensor:
    """The canary in this shape."""
    return torch.full(tensor.shape, canary_of(tensor), dtype=tensor.dtype)


def canary_of(tensor: Tensor) -> int:
    """The number whose bytes are all the canary's."""
    signed = tensor.dtype is not torch.uint8
    return int.from_bytes(bytes([CANARY_BYTE]) * tensor.itemsize, "little", signed=signed)


def _places(
    tokens: range, blocks: Sequence[int], size: int, first_block: int
) -> tuple[Tensor, Tensor]:
    """Block and slot of each token."""
    at = torch.arange(tokens.start, tokens.stop)
    table = torch.as_tensor(list(blocks), dtype=torch.int64)
    return table[at // size - first_block], at % size
