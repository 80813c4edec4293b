"""The bytes of an offer: a pure function of (offer, layer, part, head, token).

Free blocks hold a canary. Positions come from the tables of the engine, not from kvbus. Axes of a
view: block, token (of a block), head, dim; rows are [token, head, dim], as raw bits.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from kvbus.engine import KvCache
from kvbus.geometry import EngineSpec, GroupSpec
from tests.support.expected import moved, positions
from tests.support.strict_links import bits

CANARY_BYTE = 0xA5
WORD_BYTES = 8
STEPS = tuple(
    np.array([step], dtype=np.uint64)
    for step in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
NUMPY_BITS = {torch.uint8: np.uint8, torch.int16: np.int16}

Blocks = Mapping[str, Sequence[int]]
Report = Callable[[str, str], None]
"""Called with a violation and its owner."""


@dataclass(frozen=True)
class View:
    """One part of one layer on one rank, as bits, and the global heads that it holds."""

    group: GroupSpec
    layer: int
    part: str
    heads: range
    bits: Tensor


def views_of(spec: EngineSpec, caches: Iterable[KvCache]) -> list[View]:
    return [
        View(
            group=spec.group(region.group),
            layer=layer,
            part=part,
            heads=range(region.first_head, region.first_head + region.num_heads),
            bits=bits(cache.view(layer, part)),
        )
        for cache in caches
        for region in cache.rank.regions
        for layer in region.layers
        for part in region.parts
    ]


def rows(offer: int, view: View, tokens: range) -> Tensor:
    """The content of these tokens; axes: token, head, dim."""
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
    """Write tokens [first, stop) of an offer; the tables of ``blocks`` start at token 0."""
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
    holder: GroupSpec | None,
    first: int,
    stop: int,
    zero_tail: bool,
) -> Tensor:
    """All of ``blocks`` after a fetch: what was moved, and the canary everywhere else.

    A whole window is moved, as ``holder`` has it: its group at the other side. Without one only
    what the tokens need was, by way of host blocks.
    """
    want = canary_like(view.bits[: len(blocks)])
    tokens, size = positions(view.group, first, stop), view.group.block_size
    if holder is not None:
        tokens = moved(view.group, holder, first, stop)
    if tokens:
        ids, slots = _places(tokens, range(len(blocks)), size, tokens.start // size)
        want[ids, slots] = rows(offer, view, tokens)
        if zero_tail and stop % size:
            want[-1, stop % size :] = 0
    return want


def num_wrong_bytes(one: Tensor, other: Tensor) -> int:
    if torch.equal(one, other):
        return 0
    return int((one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).sum())


def canary_like(tensor: Tensor) -> Tensor:
    return torch.full(tensor.shape, canary_of(tensor), dtype=tensor.dtype)


def canary_of(tensor: Tensor) -> int:
    signed = tensor.dtype is not torch.uint8
    return int.from_bytes(bytes([CANARY_BYTE]) * tensor.itemsize, "little", signed=signed)


def _places(
    tokens: range, blocks: Sequence[int], size: int, first_block: int
) -> tuple[Tensor, Tensor]:
    at = torch.arange(tokens.start, tokens.stop)
    table = torch.as_tensor(list(blocks), dtype=torch.int64)
    return table[at // size - first_block], at % size


class Pool:
    """The blocks of every group, each free one with a canary; a change of one is reported."""

    def __init__(
        self, views: Sequence[View], num_blocks: Mapping[str, int], report: Report, seed: int
    ) -> None:
        self._views, self._report, self._random = views, report, Random(seed)
        self._free = {group: set(range(number)) for group, number in num_blocks.items()}
        self._last: dict[tuple[str, int], str] = {}
        self._num_blocks = dict(num_blocks)
        for view in views:
            view.bits.fill_(canary_of(view.bits))

    @property
    def num_held(self) -> int:
        return sum(n - len(self._free[group]) for group, n in self._num_blocks.items())

    def take(self, wanted: Mapping[str, int], owner: str) -> dict[str, list[int]] | None:
        """Blocks in random order, or None when there are not enough; their canaries live."""
        if any(len(self._free[group]) < number for group, number in wanted.items()):
            return None
        taken = {}
        for group, number in wanted.items():
            taken[group] = self._random.sample(sorted(self._free[group]), number)
            self._free[group] -= set(taken[group])
        self._check(taken)
        self._last |= {(group, at): owner for group, ids in taken.items() for at in ids}
        return taken

    def give(self, blocks: Blocks) -> None:
        for view in self._views:
            ids = torch.as_tensor(blocks[view.group.name], dtype=torch.int64)
            view.bits[ids] = canary_of(view.bits)
        for group, given in blocks.items():
            self._free[group] |= set(given)

    def check(self) -> None:
        self._check({group: sorted(free) for group, free in self._free.items()})

    def _check(self, blocks: Blocks) -> None:
        for view in self._views:
            ids = torch.as_tensor(blocks[view.group.name], dtype=torch.int64)
            found = view.bits[ids]
            if num_wrong_bytes(found, canary_like(found)):
                self._blame(view, ids, found)

    def _blame(self, view: View, ids: torch.Tensor, found: torch.Tensor) -> None:
        wrong = (found != canary_of(found)).flatten(1).any(1)
        places = [(view.group.name, int(at)) for at in ids[wrong]]
        owners = sorted({self._last.get(place, "nobody") for place in places})
        self._report("late_write", f"{len(places)} free blocks changed after {', '.join(owners)}")
        view.bits[ids[wrong]] = canary_of(found)
