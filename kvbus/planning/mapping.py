"""The prefill ranks that each decode rank reads from.

Each (layer, part, head) of a reader is looked up, so parallelism needs no cases of its own.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm
from typing import NamedTuple

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import AxisName, EngineSpec, GroupSpec, RankSpec, Region, Tile
from kvbus.planning.spans import Spans

MAX_CHOICES = 64
COMPARED_FIELDS = ("layers", "dtype", "num_kv_heads", "head_dim", "parts", "window", "state")
Cell = tuple[str, int, str]
"""Group, layer, part."""


def check_compatible(prefill: EngineSpec, decode: EngineSpec) -> None:
    """Raise `GeometryError` (``incompatible``) unless the engines can exchange KV.

    Its detail has ``field``, ``prefill`` and ``decode`` of the first difference.
    """
    _refuse_difference("model", prefill.model, decode.model)
    read, held = ({group.name for group in side.groups} for side in (decode, prefill))
    offered = [one for one in prefill.groups if one.name in read or not one.optional]
    wanted = [one for one in decode.groups if one.name in held or not one.optional]
    names = ([one.name for one in side] for side in (offered, wanted))
    _refuse_difference("groups", *names)
    for ours in offered:
        theirs = decode.group(ours.name)
        for field in COMPARED_FIELDS:
            _refuse_difference(f"{ours.name}.{field}", getattr(ours, field), getattr(theirs, field))


def _refuse_difference(field: str, prefill: object, decode: object) -> None:
    ours, theirs = _shown(prefill), _shown(decode)
    if ours != theirs:
        raise GeometryError(
            f"engines differ in {field}: prefill has {ours}, decode has {theirs}",
            code=ErrorCode.INCOMPATIBLE,
            field=field,
            prefill=ours[:512],
            decode=theirs[:512],
        )


def _shown(value: object) -> str:
    if not isinstance(value, tuple | list):
        return str(value)
    ordered = sorted(value, key=lambda one: (one if isinstance(one, int) else 0, str(one)))
    return ",".join(map(str, ordered))


@dataclass(frozen=True, slots=True)
class Share:
    """Layers x parts x heads of one group that rank ``reader`` reads from rank ``holder``.

    The parts have heads of one size. ``others`` are further readers: each gets a copy.
    """

    holder: int
    reader: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    first_head: int
    num_heads: int
    others: tuple[int, ...] = ()

    @classmethod
    def whole(cls, held: Tile | Region) -> "Share":
        return cls(0, 0, held.group, held.layers, held.parts, held.first_head, held.num_heads)

    @property
    def readers(self) -> tuple[int, ...]:
        return self.reader, *self.others

    def tile(self, layers: tuple[int, ...], start: int, stop: int) -> Tile:
        heads = self.first_head, self.num_heads
        return Tile(self.group, layers, self.parts, *heads, start, stop)


def position_bytes(held: Region | Share, group: GroupSpec) -> int:
    num_heads = len(held.layers) * len(held.parts) * held.num_heads
    return num_heads * group.head_bytes(held.parts[0])


def bytes_by_group(held: Iterable[Region | Share], engine: EngineSpec) -> Counter[str]:
    found = Counter[str]()
    for one in held:
        found[one.group] += position_bytes(one, engine.group(one.group))
    return found


def span_bytes(position_bytes: Mapping[str, int], spans: Spans) -> int:
    found = 0
    for group, num_bytes in position_bytes.items():
        start, stop = spans[group]
        found += num_bytes * (stop - start)
    return found


def cells(held: Region | Share) -> Iterator[Cell]:
    return product([held.group], held.layers, held.parts)


class _Wanted(NamedTuple):
    """Heads [first, stop) of one cell that a reader needs."""

    reader: int
    cell: Cell
    head_size: int
    first: int
    stop: int
    candidates: tuple[int, ...]
    others: tuple[int, ...] = ()


class ReadMap:
    """Raises `GeometryError` (``incompatible``) if no prefill rank holds something."""

    def __init__(
        self,
        prefill: Iterable[RankSpec],
        decode: Iterable[RankSpec],
        *,
        places: Mapping[int, Hashable] | None = None,
    ) -> None:
        self._wanted = list(_all_wanted(prefill, decode))
        self._joined = _joined(self._wanted, places or {})
        self._offsets = _offsets(self._wanted)
        self.num_choices = min(MAX_CHOICES, lcm(*{len(w.candidates) for w in self._wanted}))
        """Period of ``replica_index``, over which replicas are read equally often."""

    def shares(self, replica_index: int = 0) -> tuple[Share, ...]:
        """Readers of the same elements use different holders, and so do consecutive fetches."""
        return self._shares(self._wanted, replica_index)

    def joined(self, replica_index: int = 0) -> tuple[Share, ...]:
        """As `shares`, but read once what several readers in one place need."""
        return self._shares(self._joined, replica_index)

    def _shares(self, wanted: list[_Wanted], replica_index: int) -> tuple[Share, ...]:
        layers: dict[_Wanted, list[int]] = defaultdict(list)
        for one in self._chosen(wanted, replica_index % self.num_choices):
            group, layer, part = one.cell
            layers[one._replace(cell=(group, 0, part))].append(layer)
        parts: dict[tuple[_Wanted, tuple[int, ...]], list[str]] = defaultdict(list)
        for one, held in layers.items():
            group, _, part = one.cell
            parts[one._replace(cell=(group, 0, "")), tuple(sorted(held))].append(part)
        return tuple(
            Share(
                holder=one.candidates[0],
                reader=one.reader,
                group=one.cell[0],
                layers=held_layers,
                parts=tuple(names),
                first_head=one.first,
                num_heads=one.stop - one.first,
                others=one.others,
            )
            for (one, held_layers), names in parts.items()
        )

    def _chosen(self, wanted: list[_Wanted], replica_index: int) -> list[_Wanted]:
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


def _all_wanted(prefill: Iterable[RankSpec], decode: Iterable[RankSpec]) -> Iterator[_Wanted]:
    held: dict[Cell, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, region in _regions(prefill):
        for cell in cells(region):
            held[cell].append((region.first_head, region.first_head + region.num_heads, rank))
    for reader, region in _regions(decode):
        first, stop = region.first_head, region.first_head + region.num_heads
        for cell in cells(region):
            edges = {edge for *ends, _ in held[cell] for edge in ends if first < edge < stop}
            for start, end in pairwise([first, *sorted(edges), stop]):
                found = sorted(rank for lo, hi, rank in held[cell] if lo <= start and end <= hi)
                if not found:
                    raise GeometryError(
                        f"no prefill rank holds heads {start} to {end} of "
                        f"{'/'.join(map(str, cell))}, which decode rank {reader} needs",
                        code=ErrorCode.INCOMPATIBLE,
                        field="ranks",
                    )
                yield _Wanted(reader, cell, region.size(AxisName.DIM), start, end, tuple(found))


def _regions(ranks: Iterable[RankSpec]) -> Iterator[tuple[int, Region]]:
    return ((rank.rank, region) for rank in ranks for region in rank.regions)


def _joined(wanted: Iterable[_Wanted], places: Mapping[int, Hashable]) -> list[_Wanted]:
    readers: dict[tuple[_Wanted, Hashable], list[int]] = defaultdict(list)
    for one in wanted:
        readers[one._replace(reader=0), places.get(one.reader)].append(one.reader)
    return [
        one._replace(reader=first, others=tuple(others))
        for (one, _), (first, *others) in readers.items()
    ]


def _offsets(wanted: Iterable[_Wanted]) -> dict[tuple[tuple[int, ...], int], int]:
    """Indices start at the lowest reader, which spreads agents over the holders."""
    readers_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for one in wanted:
        if one.reader not in readers_of[one.candidates]:
            readers_of[one.candidates].append(one.reader)
    lowest = min((reader for readers in readers_of.values() for reader in readers), default=0)
    return {
        (candidates, reader): lowest + offset
        for candidates, readers in readers_of.items()
        for offset, reader in enumerate(readers)
    }
