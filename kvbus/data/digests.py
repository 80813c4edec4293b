"""Digests of KV memory, computed by the copy threads."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from kvbus.data.memories import LocalMemory
from kvbus.data.messages import DigestJob
from kvbus.geometry import BlockTable, Tile, slot_bytes
from kvbus.memory.copying import ByteRange, PagedMemory
from kvbus.planning import chosen_tiles, num_pieces

Digests = npt.NDArray[np.uint64]
PART_BYTES = 8 << 20


class DigestParts:
    def __init__(self, job: DigestJob, memory: LocalMemory) -> None:
        self._job, self._memory = job, memory
        self._found: dict[int, Digests] = {}

    def parts(self) -> Iterator[Callable[[], int]]:
        job, group = self._job, self._memory.engine.group(self._job.tile.group)
        tiles: list[Tile] = []
        num_bytes = number = 0
        for tile in chosen_tiles(job.tile, offer_id=job.offer_id, one_in=job.one_in):
            tiles.append(tile)
            num_bytes += slot_bytes(group, tile)
            if num_bytes >= PART_BYTES:
                yield partial(self._digest, number, tiles, num_bytes)
                tiles, num_bytes, number = [], 0, number + 1
        yield partial(self._digest, number, tiles, num_bytes)

    def joined(self) -> bytes:
        found = [self._found[number] for number in sorted(self._found)]
        return np.concatenate(found).astype("<u8").tobytes()

    def _digest(self, number: int, tiles: list[Tile], num_bytes: int) -> int:
        paged = self._memory.paged(self._job.tile.group)
        largest = max((slot_bytes(paged.group, tile) for tile in tiles), default=0)
        room = self._memory.room(largest)
        self._found[number] = digest_pieces(paged, self._job.table, tiles, room)
        return num_bytes


def digest_pieces(
    memory: PagedMemory, table: BlockTable, tiles: Iterable[Tile], room: npt.NDArray[np.uint8]
) -> Digests:
    """Return 64-bit XXH3 of each piece, in the order of `chosen_tiles`. A tile has one span.

    ``room`` holds one tile at a time.
    """
    found: list[int] = []
    for tile in tiles:
        gathered = room[: slot_bytes(memory.group, tile)]
        memory.gather(table, tile, ByteRange.of(gathered))
        num_tokens, by_token = tile.stop - tile.start, (len(tile.layers), len(tile.parts))
        heads = gathered.reshape(*by_token, num_tokens, tile.num_heads, -1).swapaxes(2, 3)
        pieces = np.ascontiguousarray(heads).reshape(num_pieces(tile), -1)
        found += [xxhash.xxh3_64_intdigest(piece.data) for piece in pieces]
    return np.array(found, np.uint64)
