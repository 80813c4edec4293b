"""The blocks of an engine of a chaos run, with a canary in each one that is free.

Refuses to hand out a block in which something has landed since it was free.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

import torch

from tests.chaos.pattern import Blocks, View, canary_like, canary_of, num_wrong_bytes

Report = Callable[[str, str], None]
"""Told of a violation: what it is, and of whom."""


class Pool:
    """The blocks of every group; ``last`` says who had a block."""

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
        """Blocks that are not free, of all groups."""
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
        """They are free: from now on nothing may land there."""
        for view in self._views:
            ids = torch.as_tensor(blocks[view.group.name], dtype=torch.int64)
            view.bits[ids] = canary_of(view.bits)
        for group, ids in blocks.items():
            self._free[group] |= set(ids)

    def check(self) -> None:
        """Look at every free block."""
        self._check({group: sorted(free) for group, free in self._free.items()})

    def _check(self, blocks: Blocks) -> None:
        for view in self._views:
            ids = torch.as_tensor(blocks[view.group.name], dtype=torch.int64)
            found = view.bits[ids]
            if num_wrong_bytes(found, canary_like(found)):
                self._blame(view, ids, found)

    def _blame(self, view: View, ids: torch.Tensor, found: torch.Tensor) -> None:
        """Say whose bytes landed late, once."""
        wrong = (found != canary_of(found)).flatten(1).any(1)
        places = [(view.group.name, int(at)) for at in ids[wrong]]
        owners = sorted({self._last.get(place, "nobody") for place in places})
        self._report("late_write", f"{len(places)} free blocks changed after {', '.join(owners)}")
        view.bits[ids[wrong]] = canary_of(found)
