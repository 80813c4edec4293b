"""What the engines on kvbus's SDK share: their cache with the known numbers, and their lines."""

from collections import deque
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from kvbus.engine import KvCache
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, num_blocks_for, state_group

NUM_BLOCKS, BLOCK_SIZE, HEADS = 24, 16, 4
FULL = GroupSpec("full", (0, 2), BLOCK_SIZE, HEADS, 8, "bfloat16")
TAIL = GroupSpec("tail", (1,), BLOCK_SIZE, HEADS, 8, "bfloat16", window=24)
STATE = state_group("state", (3,), (StatePart("conv", HEADS, 6), StatePart("ssm", 2, 10)))
SPEC = EngineSpec("sdk", "m", 2, (FULL, TAIL, STATE))
Blocks = dict[str, list[int]]
Spans = dict[str, tuple[int, int]]


def tell(*words: object) -> None:
    print(*words, flush=True)


class Rows(NamedTuple):
    """Rows of one layer and part: of these positions and heads, or of the units of a state."""

    layer: int
    part: int
    positions: range
    heads: range
    row_bytes: int


def numbers(name: int, rows: Rows) -> torch.Tensor:
    """The known numbers, [position, head, byte]."""
    base = 101 * name + 59 * rows.layer + 37 * rows.part + 3 * torch.arange(rows.row_bytes)
    at = torch.tensor(rows.positions)[:, None, None], torch.tensor(rows.heads)[:, None]
    return ((base + 7 * at[0] + 23 * at[1]) % 251).to(torch.uint8)


def positions_of(first_token: int, num_tokens: int, *, whole: bool = False) -> Spans:
    """Positions of each group; with ``whole`` all, also of one with a window."""
    return {
        group.name: (0, num_tokens)
        if whole and not group.state
        else group.positions(first_token, num_tokens)
        for group in SPEC.groups
    }


def first_block(group: str, start: int) -> int:
    """The block of a request that has this position."""
    return start // SPEC.group(group).block_size


class Cache:
    """The ranks' memory, and the blocks that are free."""

    def __init__(self, ranks: list[KvCache]) -> None:
        self.ranks = ranks
        self.free = {group.name: deque(range(NUM_BLOCKS)) for group in SPEC.groups}

    def grow(self, blocks: Blocks, spans: Spans) -> Blocks:
        """Lengthen tables until they hold these positions; returns the new blocks only."""
        new = {}
        for group, (start, stop) in spans.items():
            table = blocks.setdefault(group, [])
            size = SPEC.group(group).block_size
            wanted = num_blocks_for(stop, size) - start // size if stop > start else 0
            new[group] = [self.free[group].popleft() for _ in range(wanted - len(table))]
            table += new[group]
        return new

    def give_back(self, blocks: Blocks) -> None:
        for group, ids in blocks.items():
            self.free[group].extendleft(ids)

    def rows(self, blocks: Blocks, spans: Spans) -> Iterator[tuple[torch.Tensor, Any, Rows]]:
        """A view, where in it KV lies [position, head, byte], and what tells its numbers."""
        for group in SPEC.groups:
            start, stop = spans[group.name]
            if start == stop:
                continue
            table, positions = torch.tensor(blocks[group.name]), torch.arange(start, stop)
            size, tokens = group.block_size, range(start, stop)
            at = table[positions // size - start // size], positions % size
            for rank, cache in enumerate(self.ranks):
                for layer, (number, part) in product(group.layers, enumerate(group.parts)):
                    view = cache.view(layer, part).view(torch.uint8)
                    held = view.shape[2]
                    heads = range(rank * held, (rank + 1) * held)
                    yield view, at, Rows(layer, number, tokens, heads, view.shape[3])

    def fill(self, name: int, blocks: Blocks, spans: Spans) -> None:
        for view, at, which in self.rows(blocks, spans):
            view[at] = numbers(name, which)

    def num_wrong(self, name: int, blocks: Blocks, spans: Spans) -> int:
        runs = self.rows(blocks, spans)
        return sum(int((view[at] != numbers(name, which)).sum()) for view, at, which in runs)
