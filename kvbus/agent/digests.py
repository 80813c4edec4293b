"""Digests of what local engines hold, made in the threads that copy.

Nothing is digested for an engine that is lost. What is on a GPU is brought to the host first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from kvbus.agent.copiers import Copiers, Job, Work
from kvbus.agent.engines import LocalEngine
from kvbus.agent.segments import RankMemory
from kvbus.errors import KVBusError
from kvbus.geometry import DTYPE_SIZES_BYTES, BlockTable, Box
from kvbus.memory.copying import PagedMemory
from kvbus.memory.digest_pieces import Digests, digest_gathered, digest_pieces
from kvbus.planning.digests import Lattice, Numbers, PieceMap, by_lattice, chosen_pieces
from kvbus.table import Key

SHORT_BYTES = 128 << 10
"""So much is digested on the event loop, in 0.2 to 0.3 ms: a sample of 8 MiB. The way to a
thread and back takes 0.07 ms, and more where other threads have the cores.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pieces of ``box`` that `chosen_pieces` names; ``table`` has its positions."""

    box: Box
    table: BlockTable
    offer_id: str
    one_in: int
    turn: Key

    def pieces(self) -> Numbers:
        """Their numbers."""
        return chosen_pieces(self.box, offer_id=self.offer_id, one_in=self.one_in)

    def num_bytes(self, engine: LocalEngine) -> int:
        """About how much is read of one rank."""
        box, group = self.box, engine.spec.group(self.box.group)
        rows = len(box.layers) * len(box.parts) * box.num_heads * (box.stop - box.start)
        row_bytes = group.part_shape(box.parts[0]).head_dim * DTYPE_SIZES_BYTES[group.dtype]
        return rows * row_bytes // self.one_in


class Digester:
    """Digests boxes in jobs of about ``job_bytes``, in fair turns with the copies of ``copiers``.

    Where pieces lie is found out once for each rank.
    """

    def __init__(self, copiers: Copiers, *, job_bytes: int) -> None:
        self._copiers, self._job_bytes = copiers, job_bytes
        self._maps: WeakKeyDictionary[RankMemory, PieceMap] = WeakKeyDictionary()

    def start(
        self,
        wanted: Wanted,
        on_end: Callable[[Digests | KVBusError], None],
        *,
        engine: LocalEngine,
        rank: RankMemory,
    ) -> Work | None:
        """Digest on one of the engine's ranks.

        ``on_end`` is called in the event loop, once, when nothing of it runs any more; before this
        returns, with nothing, if it is done at once.
        """
        found: list[Digests] = []

        def end(error: KVBusError | None) -> None:
            on_end(found[0] if error is None else error)

        if not rank.mapped_addresses:
            gather = partial(self._digest_gathered, wanted, found)
            group = engine.spec.group(wanted.box.group)
            return self._copiers.start(
                wanted.turn, gather, end, engine=engine, memories=(rank,), group=group
            )
        if rank not in self._maps:
            self._maps[rank] = PieceMap(rank.mapped(engine.spec))
        jobs = partial(self._jobs, wanted, found, self._maps[rank])
        at_once = wanted.num_bytes(engine) <= SHORT_BYTES
        return self._copiers.start_jobs(wanted.turn, jobs, end, engine=engine, at_once=at_once)

    def _jobs(self, wanted: Wanted, found: list[Digests], pieces_at: PieceMap) -> Iterable[Job]:
        """Jobs that fill in the digests of one rank, whose memory is mapped."""
        pieces = wanted.pieces()
        digests = np.zeros(pieces.size, np.uint64)
        found.append(digests)
        lattices = pieces_at.lattices(wanted.box, wanted.table)
        for lattice, which, numbers in by_lattice(lattices, pieces):
            longest = int(np.diff(lattice.edges).max()) * lattice.row_bytes
            step = max(1, self._job_bytes // longest)
            for first in range(0, which.size, step):
                part = slice(first, first + step)
                yield partial(_fill, digests, which[part], lattice, numbers[part])

    def _digest_gathered(self, wanted: Wanted, found: list[Digests], memory: PagedMemory) -> None:
        """All at once, of memory that this process cannot look into."""
        table, box, pieces = wanted.table, wanted.box, wanted.pieces()
        found.append(digest_gathered(memory, table, box, pieces, buffer_bytes=self._job_bytes))


def _fill(digests: Digests, which: Numbers, lattice: Lattice, numbers: Numbers) -> None:
    digests[which] = digest_pieces(lattice, numbers)
