"""Digests of what local engines hold, made in the threads that copy.

Nothing is digested for an engine that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from kvbus.agent.copiers import Copiers, Work
from kvbus.agent.engine import LocalEngine
from kvbus.agent.segments import RankMemory
from kvbus.errors import KVBusError
from kvbus.geometry import BlockTable, Box, slot_bytes
from kvbus.memory.copying import PagedMemory
from kvbus.planning import chosen_boxes, num_pieces
from kvbus.table import Key

Digests = npt.NDArray[np.uint64]
JOB_BYTES = 8 << 20
"""About so much is digested by one job."""
SHORT_BYTES = 128 << 10
"""So much is digested on the event loop, in about 0.3 ms: a sample of 8 MiB. The way to a
thread and back takes 0.07 ms, and more where other threads have the cores.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pieces of ``box`` that `chosen_boxes` names; ``table`` has its positions."""

    box: Box
    table: BlockTable
    offer_id: str
    one_in: int
    turn: Key

    def boxes(self) -> Iterator[Box]:
        return chosen_boxes(self.box, offer_id=self.offer_id, one_in=self.one_in)


def start_digest(
    copiers: Copiers,
    wanted: Wanted,
    on_end: Callable[[Digests | KVBusError], None],
    *,
    engine: LocalEngine,
    rank: RankMemory,
) -> Work | None:
    """Digest on one of the engine's ranks, in fair turns with copies.

    ``on_end`` is called in the event loop, once, when nothing of it runs any more; before this
    returns, with nothing, if it is done at once.
    """
    group, found = engine.spec.group(wanted.box.group), dict[int, Digests]()

    def digest(number: int, boxes: list[Box], memory: PagedMemory) -> None:
        found[number] = digest_pieces(memory, wanted.table, boxes)

    def plan() -> Iterator[Callable[[PagedMemory], None]]:
        boxes: list[Box] = []
        num_bytes = number = 0
        for box in wanted.boxes():
            boxes.append(box)
            num_bytes += slot_bytes(group, box)
            if num_bytes >= JOB_BYTES:
                yield partial(digest, number, boxes)
                boxes, num_bytes, number = [], 0, number + 1
        yield partial(digest, number, boxes)

    def end(error: KVBusError | None) -> None:
        on_end(error or np.concatenate([found[number] for number in sorted(found)]))

    about_bytes = slot_bytes(group, wanted.box) // wanted.one_in
    return copiers.start(
        wanted.turn,
        plan,
        end,
        engine=engine,
        memories=(rank,),
        group=group,
        at_once=bool(rank.mapped_addresses) and about_bytes <= SHORT_BYTES,
    )


def digest_pieces(memory: PagedMemory, table: BlockTable, boxes: Iterable[Box]) -> Digests:
    """XXH3 of 64 bits of each piece of ``boxes``, of one span each, in the order of `chosen_boxes`.

    A box is gathered into memory of this process. Raises as `PagedMemory.gather`.
    """
    found: list[int] = []
    for box in boxes:
        gathered = np.empty(slot_bytes(memory.group, box), np.uint8)
        memory.gather(table, box, gathered)
        num_tokens, by_token = box.stop - box.start, (len(box.layers), len(box.parts))
        heads = gathered.reshape(*by_token, num_tokens, box.num_heads, -1).swapaxes(2, 3)
        pieces = np.ascontiguousarray(heads).reshape(num_pieces(box), -1)
        found += [xxhash.xxh3_64_intdigest(piece.data) for piece in pieces]
    return np.array(found, np.uint64)
