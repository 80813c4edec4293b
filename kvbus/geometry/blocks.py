"""Block tables: the cache blocks that hold the token positions of a request."""

import struct
from contextlib import suppress
from typing import Annotated

import msgspec
import numpy as np
import numpy.ma  # np.unique imports it at its first call (10 ms): not in a first fetch
import numpy.typing as npt

from kvbus.errors import GeometryError

MAX_BLOCKS = 1 << 20
FEW_IDS = 64
"""Up to this many ids, Python is faster than a numpy call."""

DENSE = 32
"""Below this ratio of largest id to number of ids, ids are not sorted."""

BlockIds = npt.NDArray[np.uint32]


class BlockTable(msgspec.Struct, frozen=True):
    """The blocks of one group, from block ``first_block`` of the request on; see [Block
    tables](protocol-engine.md#block-tables).
    """

    ids: bytes
    """Up to 1,048,576 block ids as little-endian uint32."""
    first_block: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)] = 0
    """Block of the request that the first id is."""

    @classmethod
    def of(cls, block_ids: npt.ArrayLike, *, first_block: int = 0) -> "BlockTable":
        """Make a table of ids; raise `GeometryError` unless they are one row of uint32."""
        if isinstance(block_ids, list | tuple | range) and len(block_ids) <= FEW_IDS:
            with suppress(struct.error):  # other values are checked below
                return cls(struct.pack(f"<{len(block_ids)}I", *block_ids), first_block)
        try:
            ids = np.asarray(block_ids)
        except ValueError as error:  # rows of different lengths
            raise GeometryError("block ids must be one row of integers") from error
        whole = ids.size == 0 or np.issubdtype(ids.dtype, np.integer)
        if ids.ndim != 1 or not whole or (ids.size and (ids.min() < 0 or ids.max() >= 2**32)):
            raise GeometryError("block ids must be one row of integers from 0 to 2**32 - 1")
        return cls(ids=ids.astype("<u4").tobytes(), first_block=first_block)

    def array(self) -> BlockIds:
        """Return the ids without a copy; raise `GeometryError` if the last one is incomplete."""
        if len(self.ids) % 4:
            raise GeometryError(f"block table of {len(self.ids)} bytes is not whole uint32 ids")
        return np.frombuffer(self.ids, dtype="<u4")

    def __len__(self) -> int:
        return len(self.ids) // 4

    def block(self, number: int) -> int:
        """Return the id of block ``number`` of the request; raise `IndexError` if it is absent."""
        at = 4 * (number - self.first_block)
        if not 0 <= at <= len(self.ids) - 4:
            raise IndexError(
                f"no block {number} in a block table from {self.first_block} on, of {len(self)}"
            )
        return int.from_bytes(self.ids[at : at + 4], "little")

    def extended(self, more: "BlockTable") -> "BlockTable":
        """Append ``more`` in a new table; raise `GeometryError` unless it starts at the end."""
        _check_number(self.array().size + more.array().size)
        if more.first_block != self.first_block + len(self):
            raise GeometryError(
                f"extension starts at block {more.first_block}, "
                f"the table ends at {self.first_block + len(self)}",
                starts_at=more.first_block,
                ends_at=self.first_block + len(self),
            )
        return BlockTable(ids=self.ids + more.ids, first_block=self.first_block)

    def check_below(self, num_blocks: int) -> int:
        """Return the largest id, or -1 if empty; raises `GeometryError` if out of range."""
        ids = self._ids()
        largest = max(ids, default=-1) if isinstance(ids, tuple) else int(ids.max())
        if largest >= num_blocks:
            raise GeometryError(
                f"block id {largest} is out of range, the cache has {num_blocks} blocks",
                block_id=largest,
                num_blocks=num_blocks,
            )
        return largest

    def check_ids(self, num_blocks: int) -> None:
        """Raise `GeometryError` unless all ids are distinct and below ``num_blocks``."""
        _check_number(len(self))
        largest, ids = self.check_below(num_blocks), self._ids()
        if isinstance(ids, tuple):
            num_distinct = len(set(ids))
        elif largest >= DENSE * len(ids):
            num_distinct = len(np.unique(ids))
        else:
            seen = np.zeros(largest + 1, dtype=np.bool_)  # sorting a million ids takes 50 ms
            seen[ids] = True
            num_distinct = int(np.count_nonzero(seen))
        if num_distinct != len(ids):
            raise GeometryError("block table names a block twice")

    def check_covers(self, start: int, stop: int, block_size: int) -> None:
        """Raise `GeometryError` unless the table is exactly the blocks of tokens [start, stop)."""
        first = start // block_size
        needed = -(-stop // block_size) - first if stop > start else 0
        if len(self.ids) != 4 * needed or (needed and self.first_block != first):
            raise GeometryError(
                f"tokens {start} to {stop} in blocks of {block_size} need {needed} blocks from "
                f"block {first} on, the table has {len(self)} from block {self.first_block} on",
                needed=needed,
                given=len(self),
            )

    def check_holds(self, start: int, stop: int, block_size: int, *, group: str) -> None:
        """Raise `GeometryError` unless the table includes the blocks of tokens [start, stop)."""
        first, end = start // block_size, num_blocks_for(stop, block_size)
        if start < stop and not self.first_block <= first < end <= self.first_block + len(self):
            raise GeometryError(
                f"tokens {start} to {stop} are in blocks {first} to {end} of group '{group}', the "
                f"table has {len(self)} from block {self.first_block} on",
                needed=end,
                given=self.first_block + len(self),
            )

    def _ids(self) -> tuple[int, ...] | BlockIds:
        num_ids, rest = divmod(len(self.ids), 4)
        if rest or num_ids > FEW_IDS:
            return self.array()
        return struct.unpack(f"<{num_ids}I", self.ids)


NO_BLOCKS = BlockTable(b"")


def _check_number(num_blocks: int) -> None:
    if num_blocks > MAX_BLOCKS:
        raise GeometryError(
            f"a block table has {num_blocks:,} blocks, {MAX_BLOCKS:,} at most: use larger blocks "
            "(block size, page size), or hand off fewer tokens",
            num_blocks=num_blocks,
            limit=MAX_BLOCKS,
        )


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
