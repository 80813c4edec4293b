"""What to copy between a device's blocks and host blocks for positions of a request (pure).

Refuses to touch slots outside of the positions: a block that is filled partly is copied partly.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvbus.geometry.blocks import BlockIds


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Device block ``device_ids[i]`` and host block ``first_host_block + i``, all alike.

    Of each block, token slots [slots[0], slots[1]).
    """

    group: str
    device_ids: BlockIds
    first_host_block: int
    slots: tuple[int, int]


def cut_into_copies(
    group: str,
    device_ids: BlockIds,
    host_ids: BlockIds,
    *,
    span: tuple[int, int],
    block_size: int,
    first_block: int,
) -> Iterator[BlockCopy]:
    """The copies of positions [span) of one group.

    Both tables start at block ``first_block`` of the request and hold the span. A copy is of blocks
    whose host blocks follow each other and are copied whole, or of one block that is not.
    """
    start, stop = span
    while start < stop:
        block, slot = divmod(start, block_size)
        at = block - first_block
        if slot or stop - start < block_size:
            end, num_blocks = min(stop, (block + 1) * block_size), 1
            slots = slot, end - block * block_size
        else:
            num_blocks = _run_length(host_ids[at : at + (stop - start) // block_size])
            end, slots = start + num_blocks * block_size, (0, block_size)
        yield BlockCopy(group, device_ids[at : at + num_blocks], int(host_ids[at]), slots)
        start = end


def _run_length(ids: BlockIds) -> int:
    """How many ids from the first on follow each other."""
    breaks = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1)
    return int(breaks[0]) + 1 if breaks.size else len(ids)
