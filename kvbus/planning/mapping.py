"""Who reads what from whom: for each rank of the decode engine, the ranks that it reads from.

What a reader holds is looked for by position (layer, part, head) in what the prefill ranks hold.
So tensor parallelism, replicas and pipeline stages of any kind need no case of their own.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import lcm
from typing import NamedTuple

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import AxisName, GroupSpec, RankSpec, Region

MAX_CHOICES = 64
Cell = tuple[str, int, str]
"""Group, layer, part."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rank ``reader`` reads layers x parts x heads of one group from rank ``holder``.

    The parts have heads of one size; which tokens is up to the fetch. ``others`` are further
    readers of a joined share: each gets a copy of what ``reader`` reads.
    """

    holder: int
    reader: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    first_head: int
    num_heads: int
    others: tuple[int, ...] = ()

    @property
    def readers(self) -> tuple[int, ...]:
        """All ranks that it is for."""
        return self.reader, *self.others

    def position_bytes(self, group: GroupSpec) -> int:
        """Bytes at one position of the block table; ``group`` is either side's."""
        heads = len(self.layers) * len(self.parts) * self.num_heads
        return heads * group.head_bytes(self.parts[0])


class _Held(NamedTuple):
    """Heads [first, stop) that one rank holds of a cell."""

    first: int
    stop: int
    rank: int


class _Wanted(NamedTuple):
    """Heads of one cell that one reader needs, and every rank that holds them all.

    ``others`` need the same, and get a copy of what the reader reads.
    """

    reader: int
    cell: Cell
    head_size: int
    first: int
    stop: int
    candidates: tuple[int, ...]
    others: tuple[int, ...] = ()


class ReadMap:
    """All that the decode ranks hold, with every prefill rank that it could be read from.

    ``decode`` may be some ranks of the engine only; ``places`` says where each of them is, for
    `joined`. Without, all are in one place.
    Raises `GeometryError` (``incompatible``) when no prefill rank holds something.
    """

    def __init__(
        self,
        prefill: Iterable[RankSpec],
        decode: Iterable[RankSpec],
        *,
        places: Mapping[int, Hashable] | None = None,
    ) -> None:
        held = _held(prefill)
        self._wanted = [
            wanted
            for reader in decode
            for region in reader.regions
            for wanted in _wanted(reader.rank, region, held)
        ]
        self._joined = _joined(self._wanted, places or {})
        self._offsets = _offsets(self._wanted)
        self.num_choices = min(MAX_CHOICES, lcm(*{len(w.candidates) for w in self._wanted}))
        """After so many values of ``replica_index`` the shares are the same again.

        Over these, replicas are read equally often; where the cap cuts a round short, within one.
        """

    def shares(self, replica_index: int = 0) -> tuple[Share, ...]:
        """One holder for each element; ``replica_index`` says which, where several ranks have it.

        Readers that want the same, and values of ``replica_index`` next to each other, take
        different holders, so that replicas share the load within a fetch and over fetches.
        """
        return self._shares(self._wanted, replica_index)

    def joined(self, replica_index: int = 0) -> tuple[Share, ...]:
        """The same, but what several readers in one place want is read once, for all of them."""
        return self._shares(self._joined, replica_index)

    def _shares(self, wanted: list[_Wanted], replica_index: int) -> tuple[Share, ...]:
        layers: dict[tuple[Share, int, str], list[int]] = defaultdict(list)
        for one in self._chosen(wanted, replica_index % self.num_choices):
            group, layer, part = one.cell
            readers, num_heads = (one.candidates[0], one.reader), one.stop - one.first
            heads = Share(*readers, group, (), (), one.first, num_heads, one.others)
            layers[heads, one.head_size, part].append(layer)
        parts: dict[tuple[Share, int, tuple[int, ...]], list[str]] = defaultdict(list)
        for (heads, head_size, part), held in layers.items():
            parts[heads, head_size, tuple(sorted(held))].append(part)
        return tuple(
            replace(heads, layers=held, parts=tuple(names))
            for (heads, _, held), names in parts.items()
        )

    def _chosen(self, wanted: list[_Wanted], replica_index: int) -> list[_Wanted]:
        """Each with the one candidate that is chosen; neighbouring heads of one become one."""
        chosen: list[_Wanted] = []
        for each in wanted:
            index = replica_index + self._offsets[each.candidates, each.reader]
            holder = each.candidates[index % len(each.candidates)]
            one = each._replace(candidates=(holder,))
            if chosen and chosen[-1]._replace(first=one.first, stop=one.stop) == one:
                chosen[-1] = chosen[-1]._replace(stop=one.stop)
            else:
                chosen.append(one)
        return chosen


def _held(ranks: Iterable[RankSpec]) -> dict[Cell, list[_Held]]:
    held: dict[Cell, list[_Held]] = defaultdict(list)
    for rank in ranks:
        for region in rank.regions:
            one = _Held(region.first_head, region.first_head + region.num_heads, rank.rank)
            for cell in cells(region):
                held[cell].append(one)
    return held


def cells(held: Region | Share) -> Iterator[Cell]:
    """Every layer and part of what is held or read."""
    return product([held.group], held.layers, held.parts)


def _wanted(reader: int, region: Region, held: dict[Cell, list[_Held]]) -> Iterator[_Wanted]:
    """The region's heads, cut wherever the set of ranks that hold them changes."""
    first, stop = region.first_head, region.first_head + region.num_heads
    head_size = region.size(AxisName.DIM)
    for cell in cells(region):
        holders = held.get(cell, [])
        edges = {edge for one in holders for edge in (one.first, one.stop) if first < edge < stop}
        cuts = [first, *sorted(edges), stop]
        for start, end in pairwise(cuts):
            candidates = sorted(h.rank for h in holders if h.first <= start and end <= h.stop)
            if not candidates:
                raise GeometryError(
                    f"no prefill rank holds heads {start} to {end} of {'/'.join(map(str, cell))}, "
                    f"which decode rank {reader} needs",
                    code=ErrorCode.INCOMPATIBLE,
                    field="ranks",
                )
            yield _Wanted(reader, cell, head_size, start, end, tuple(candidates))


def _joined(wanted: Iterable[_Wanted], places: Mapping[int, Hashable]) -> list[_Wanted]:
    """One for all readers in a place that want the same: the first of them reads it."""
    readers: dict[tuple[_Wanted, Hashable], list[int]] = defaultdict(list)
    for one in wanted:
        readers[one._replace(reader=0), places.get(one.reader)].append(one.reader)
    return [
        one._replace(reader=first, others=tuple(others))
        for (one, _), (first, *others) in readers.items()
    ]


def _offsets(wanted: Iterable[_Wanted]) -> dict[tuple[tuple[int, ...], int], int]:
    """For each reader of each set of holders, its position in the row of those that read them.

    Rows start at the lowest reader, so that agents that do not know each other's differ, too.
    """
    readers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for one in wanted:
        if one.reader not in readers[one.candidates]:
            readers[one.candidates].append(one.reader)
    lowest = min((reader for row in readers.values() for reader in row), default=0)
    return {
        (candidates, reader): lowest + offset
        for candidates, row in readers.items()
        for offset, reader in enumerate(row)
    }
