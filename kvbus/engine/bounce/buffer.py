"""A rank's host blocks, in memory that the agent maps, and the calls of the engine's function."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch

from kvbus.engine.bounce.copies import BlockCopy
from kvbus.engine.region_tensor import region_tensor
from kvbus.geometry import EngineSpec, RankSpec
from kvbus.geometry.blocks import BlockIds


class Direction(StrEnum):
    """Which way blocks are copied."""

    SAVE = "save"
    """From the device into host blocks."""

    LOAD = "load"
    """From host blocks to the device."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """Blocks of one group on one rank's device; ``ids`` are the engine's, uint32.

    Of each, the token slots [slots[0], slots[1]) of ``layers`` and ``parts``.
    """

    rank: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    ids: BlockIds
    slots: tuple[int, int]


CopyBlocks = Callable[[HostBlocks, torch.Tensor, Direction], None]
"""The engine's function: copies between ``blocks`` on its device and a view of host blocks.

The view is [block, layer, part, token, head, dim] as ``blocks`` lists them, in the group's dtype;
its blocks follow each other, and whole ones are one piece of memory. Called in a thread, and done
when it returns.
"""


class HostBuffer:
    """The host blocks of one rank; ``tensor`` is all of their bytes, should the device pin them."""

    def __init__(self, engine: EngineSpec, rank: RankSpec, tensor: torch.Tensor) -> None:
        self.rank, self.tensor = rank, tensor
        self._regions = [(region, region_tensor(engine, region, tensor)) for region in rank.regions]

    def run(self, direction: Direction, copies: Iterable[BlockCopy], copy: CopyBlocks) -> None:
        """Call ``copy`` for each of ``copies`` that this rank has a part of; in this thread."""
        for one in copies:
            stop = one.first_host_block + len(one.device_ids)
            for region, tensor in self._regions:
                if region.group != one.group:
                    continue
                blocks = HostBlocks(
                    rank=self.rank.rank,
                    group=one.group,
                    layers=region.layers,
                    parts=region.parts,
                    ids=one.device_ids,
                    slots=one.slots,
                )
                start, end = one.slots
                copy(blocks, tensor[one.first_host_block : stop, :, :, start:end], direction)
