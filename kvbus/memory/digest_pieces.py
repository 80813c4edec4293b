"""Digests of pieces of a rank's memory: XXH3 of 64 bits, from the package `xxhash`."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from kvbus.geometry import BlockTable, Box, slot_bytes
from kvbus.memory.copying import PagedMemory, gather
from kvbus.planning.digests import num_pieces

Digests = npt.NDArray[np.uint64]


def digest_pieces(memory: PagedMemory, table: BlockTable, boxes: Iterable[Box]) -> Digests:
    """The digest of each piece of ``boxes``, of one span each, in the order of `chosen_boxes`.

    A box is gathered into memory of this process. Raises `GeometryError` as `gather` does.
    """
    found: list[int] = []
    for box in boxes:
        gathered = np.empty(slot_bytes(memory.group, box), np.uint8)
        gather(memory, table, box, gathered)
        num_tokens, by_token = box.stop - box.start, (len(box.layers), len(box.parts))
        heads = gathered.reshape(*by_token, num_tokens, box.num_heads, -1).swapaxes(2, 3)
        pieces = np.ascontiguousarray(heads).reshape(num_pieces(box), -1)
        found += [xxhash.xxh3_64_intdigest(piece.data) for piece in pieces]
    return np.array(found, np.uint64)
