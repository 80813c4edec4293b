"""Digests of KV memory, computed by the copy threads."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from kvbus.data.memories import LocalMemory
from kvbus.data.messages import Digest
from kvbus.geometry import BlockTable, Box, slot_bytes
from kvbus.memory.copying import PagedMemory
from kvbus.planning import chosen_boxes, num_pieces

Digests = npt.NDArray[np.uint64]
PART_BYTES = 8 << 20


class DigestParts:
    def __init__(self, asked: Digest, memory: LocalMemory) -> None:
        self._asked, self._memory = asked, memory
        self._found: dict[int, Digests] = {}

    def parts(self) -> Iterator[Callable[[], int]]:
        asked, group = self._asked, self._memory.engine.group(self._asked.box.group)
        boxes: list[Box] = []
        num_bytes = number = 0
        for box in chosen_boxes(asked.box, offer_id=asked.offer_id, one_in=asked.one_in):
            boxes.append(box)
            num_bytes += slot_bytes(group, box)
            if num_bytes >= PART_BYTES:
                yield partial(self._digest, number, boxes, num_bytes)
                boxes, num_bytes, number = [], 0, number + 1
        yield partial(self._digest, number, boxes, num_bytes)

    def joined(self) -> bytes:
        """Return all digests, in the order of `chosen_boxes`."""
        found = [self._found[number] for number in sorted(self._found)]
        return np.concatenate(found).astype("<u8").tobytes()

    def _digest(self, number: int, boxes: list[Box], num_bytes: int) -> int:
        paged = self._memory.paged(self._asked.box.group)

        def digest() -> None:
            self._found[number] = digest_pieces(paged, self._asked.table, boxes)

        self._memory.run(digest)
        return num_bytes


def digest_pieces(memory: PagedMemory, table: BlockTable, boxes: Iterable[Box]) -> Digests:
    """Return 64-bit XXH3 of each piece, in the order of `chosen_boxes`. A box has one span."""
    found: list[int] = []
    for box in boxes:
        gathered = np.empty(slot_bytes(memory.group, box), np.uint8)
        memory.gather(table, box, gathered)
        num_tokens, by_token = box.stop - box.start, (len(box.layers), len(box.parts))
        heads = gathered.reshape(*by_token, num_tokens, box.num_heads, -1).swapaxes(2, 3)
        pieces = np.ascontiguousarray(heads).reshape(num_pieces(box), -1)
        found += [xxhash.xxh3_64_intdigest(piece.data) for piece in pieces]
    return np.array(found, np.uint64)
