"""Digests of what local engines hold, made in the threads that copy.

Nothing is digested for an engine that is lost. What is on a GPU is brought to the host first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.agent.staging.copiers import Copiers
from kvbus.agent.staging.turns import Job, Work
from kvbus.errors import KVBusError
from kvbus.geometry import DTYPE_SIZES_BYTES, BlockTable, Box
from kvbus.memory.digest_pieces import Digests, digest_pieces
from kvbus.planning.digests import (
    Lattice,
    Numbers,
    PieceMap,
    by_lattice,
    chosen_pieces,
)

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory

SHORT_BYTES = 1 << 20
"""So much is digested on the event loop, in some 0.1 ms; the way to a thread and back takes 0.07,
and more where other threads have the cores. It is a sample of 64 MiB.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pieces of ``box`` that `chosen_pieces` names; ``table`` has its positions."""

    box: Box
    table: BlockTable
    offer_id: str
    one_in: int

    def pieces(self) -> Numbers:
        """Their numbers."""
        return chosen_pieces(self.box, offer_id=self.offer_id, one_in=self.one_in)


class Places(NamedTuple):
    """Where the pieces of a box lie in one rank's memory, in lattices.

    With each lattice come which of the pieces are in it, and their numbers there.
    """

    num_pieces: int
    by_lattice: list[tuple[Lattice, Numbers, Numbers]]


@dataclass(slots=True, eq=False)
class Digesting:
    """One box that is digested on some ranks; ``found`` has the digests by rank."""

    on_end: Callable[[KVBusError | None, Digesting], None]
    num_left: int
    found: dict[RankMemory, Digests] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    error: KVBusError | None = None

    def stop(self, error: KVBusError) -> None:
        """Begin nothing more of it; its end follows when nothing runs."""
        for work in self.works:
            work.stop(error)

    def end_one(self, error: KVBusError | None) -> None:
        """One rank is done."""
        self.error = self.error or error
        self.num_left -= 1
        if not self.num_left:
            self.on_end(self.error, self)


class Digester:
    """Digests boxes in jobs of about ``job_bytes``, in fair turns with the copies of ``copiers``.

    Where pieces lie is found out once for each rank, and kept until its engine is forgotten.
    """

    def __init__(self, copiers: Copiers, *, job_bytes: int) -> None:
        self._copiers, self._job_bytes = copiers, job_bytes
        self._maps: dict[RankMemory, PieceMap] = {}

    def forget(self, engine: LocalEngine) -> None:
        """The engine is lost."""
        for rank in engine.ranks.values():
            self._maps.pop(rank, None)

    def places(
        self, wanted: Wanted, *, engine: LocalEngine, ranks: Sequence[RankMemory]
    ) -> dict[RankMemory, Places]:
        """What `start` finds out first, for who has the time before.

        By rank; none of what takes threads.
        """
        if _num_bytes(engine, wanted) > SHORT_BYTES:
            return {}
        return {
            rank: _places(wanted, self._map(engine, rank))
            for rank in ranks
            if rank.mapped_addresses
        }

    def start(
        self,
        wanted: Wanted,
        on_end: Callable[[KVBusError | None, Digesting], None],
        *,
        engine: LocalEngine,
        ranks: Sequence[RankMemory],
        places: Mapping[RankMemory, Places] | None = None,
    ) -> Digesting:
        """Digest on each of ``ranks``, which are of ``engine``.

        ``on_end`` is called in the event loop, once, when nothing of it runs any more.
        """
        digesting = Digesting(on_end, len(ranks))
        for rank in ranks:
            known = None if places is None else places.get(rank)
            work = self._start_one(wanted, digesting, engine, rank, known)
            if work is not None:
                digesting.works.append(work)
        return digesting

    def _start_one(
        self,
        wanted: Wanted,
        digesting: Digesting,
        engine: LocalEngine,
        rank: RankMemory,
        places: Places | None,
    ) -> Work | None:
        if not rank.mapped_addresses:
            return self._copiers.start(
                partial(self._digest_gathered, wanted, digesting, rank),
                digesting.end_one,
                engine=engine,
                memories=(rank,),
                group=engine.spec.group(wanted.box.group),
            )
        pieces_at = self._map(engine, rank)
        return self._copiers.start_jobs(
            lambda: self._jobs(places or _places(wanted, pieces_at), digesting, rank),
            digesting.end_one,
            engine=engine,
            at_once=_num_bytes(engine, wanted) <= SHORT_BYTES,
        )

    def _map(self, engine: LocalEngine, rank: RankMemory) -> PieceMap:
        if rank not in self._maps:
            self._maps[rank] = PieceMap(rank.mapped(engine.spec))
        return self._maps[rank]

    def _jobs(self, places: Places, digesting: Digesting, rank: RankMemory) -> Iterable[Job]:
        """Jobs that fill in the digests of one rank, whose memory is mapped."""
        found = digesting.found[rank] = np.zeros(places.num_pieces, np.uint64)
        for lattice, which, numbers in places.by_lattice:
            for part in self._parts(lattice, which.size):
                yield partial(_fill, found, which[part], lattice, numbers[part])

    def _parts(self, lattice: Lattice, num: int) -> Iterator[slice]:
        longest = int(np.diff(lattice.edges).max()) * lattice.row_bytes
        step = max(1, self._job_bytes // longest)
        for first in range(0, num, step):
            yield slice(first, first + step)

    def _digest_gathered(
        self, wanted: Wanted, digesting: Digesting, rank: RankMemory, memory: PagedMemory
    ) -> None:
        """All at once, of memory that this process cannot look into."""
        from kvbus.memory.digest_gathered import digest_gathered  # noqa: PLC0415  # imports torch

        digesting.found[rank] = digest_gathered(
            memory, wanted.table, wanted.box, wanted.pieces(), buffer_bytes=self._job_bytes
        )


def _places(wanted: Wanted, pieces_at: PieceMap) -> Places:
    pieces, lattices = wanted.pieces(), pieces_at.lattices(wanted.box, wanted.table)
    return Places(pieces.size, list(by_lattice(lattices, pieces)))


def _fill(found: Digests, which: Numbers, lattice: Lattice, numbers: Numbers) -> None:
    found[which] = digest_pieces(lattice, numbers)


def _num_bytes(engine: LocalEngine, wanted: Wanted) -> int:
    """About how much is read of one rank."""
    box, group = wanted.box, engine.spec.group(wanted.box.group)
    rows = len(box.layers) * len(box.parts) * box.num_heads * (box.stop - box.start)
    row_bytes = group.part_shape(box.parts[0]).head_dim * DTYPE_SIZES_BYTES[group.dtype]
    return rows * row_bytes // wanted.one_in
