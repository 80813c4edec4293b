"""Where the ranks of one side, and the KV heads in them, lie in the picture of a plan.

Heights and positions are in pixels; y goes down.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.geometry import EngineSpec, held_heads, held_layers
from kvbus.plan.plan import PlannedRead

TOTAL_HEIGHT = 560.0
LEAST_CELL, MOST_CELL = 1.5, 16.0
LEAST_RANK = 15.0
RANK_GAP, BAR_GAP, STAGE_GAP = 6.0, 3.0, 14.0


@dataclass(frozen=True, slots=True)
class Bar:
    """What a rank holds of one group, or of one part of a state: a cell for each head."""

    group: str
    parts: tuple[str, ...]
    heads: range
    top: float
    cell: float

    @property
    def height(self) -> float:
        """Of all cells."""
        return len(self.heads) * self.cell

    def y(self, head: int) -> float:
        """Where the cell of a head begins."""
        return self.top + (head - self.heads.start) * self.cell


@dataclass(frozen=True, slots=True)
class DrawnRank:
    """One rank: its bars from ``top`` on."""

    number: int
    layers: tuple[int, ...]
    top: float
    height: float
    bars: tuple[Bar, ...]

    def interval(self, read: PlannedRead) -> tuple[float, float]:
        """Where the heads of ``read`` lie; `StopIteration` when the rank has none of them."""
        parts = set(read.parts)
        bar = next(one for one in self.bars if one.group == read.group and parts <= set(one.parts))
        first, stop = read.heads
        return bar.y(first), bar.y(stop)


def cell_height(*engines: EngineSpec) -> float:
    """Of one head, so that the longer side has about `TOTAL_HEIGHT`."""
    num_heads = max(
        sum(len(heads) for rank in range(engine.num_ranks) for *_, heads in _held(engine, rank))
        for engine in engines
    )
    return min(MOST_CELL, max(LEAST_CELL, TOTAL_HEIGHT / num_heads))


def column(engine: EngineSpec, cell: float) -> tuple[DrawnRank, ...]:
    """The ranks of one side, from y = 0 down."""
    ranks: list[DrawnRank] = []
    top = 0.0
    for number in range(engine.num_ranks):
        if number:
            top += RANK_GAP if number % engine.tp_size else STAGE_GAP
        bars: list[Bar] = []
        end = top
        for group, parts, heads in _held(engine, number):
            bars.append(Bar(group, parts, heads, end, cell))
            end += bars[-1].height + BAR_GAP
        height = max(LEAST_RANK, end - BAR_GAP - top)
        layers = tuple(sorted(held_layers(engine, number)))
        ranks.append(DrawnRank(number, layers, top, height, tuple(bars)))
        top += height
    return tuple(ranks)


def _held(engine: EngineSpec, rank: int) -> Iterator[tuple[str, tuple[str, ...], range]]:
    """The heads of each group that the rank has layers of, a state's for each of its parts."""
    layers = held_layers(engine, rank)
    for group in engine.groups:
        if layers.isdisjoint(group.layers):
            continue
        for parts in [(part,) for part in group.parts] if group.state else [group.parts]:
            num_heads = group.part_shape(parts[0]).num_heads
            yield group.name, parts, held_heads(rank % engine.tp_size, engine.tp_size, num_heads)
