"""Where the ranks of one side, and the KV heads in them, lie in the picture of a plan.

Refuses to draw: heights and places are in pixels, y goes down.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.geometry import EngineSpec, GroupSpec, held_heads, held_layers
from kvbus.planning import Share

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

    def interval(self, first_head: int, num_heads: int) -> tuple[float, float]:
        """From where to where these heads lie."""
        top = self.top + (first_head - self.heads.start) * self.cell
        return top, top + num_heads * self.cell


@dataclass(frozen=True, slots=True)
class DrawnRank:
    """One rank: its bars from ``top`` on."""

    number: int
    stage: int
    layers: tuple[int, ...]
    top: float
    height: float
    bars: tuple[Bar, ...]

    def interval(self, share: Share) -> tuple[float, float]:
        """Where the heads of ``share`` lie; `StopIteration` when the rank has none of them."""
        bar = next(
            bar
            for bar in self.bars
            if bar.group == share.group and set(share.parts) <= set(bar.parts)
        )
        return bar.interval(share.first_head, share.num_heads)


def cell_height(*engines: EngineSpec) -> float:
    """Of one head, so that the longer side has about `TOTAL_HEIGHT`."""
    num_heads = max(
        sum(len(heads) for rank in range(engine.num_ranks) for _, _, heads in _held(engine, rank))
        for engine in engines
    )
    return min(MOST_CELL, max(LEAST_CELL, TOTAL_HEIGHT / num_heads))


def column(engine: EngineSpec, cell: float) -> tuple[DrawnRank, ...]:
    """The ranks of one side, from y = 0 down."""
    ranks: list[DrawnRank] = []
    top = 0.0
    for number in range(engine.num_ranks):
        stage = number // engine.tp_size
        if ranks:
            top += RANK_GAP if ranks[-1].stage == stage else STAGE_GAP
        bars: list[Bar] = []
        end = top
        for group, parts, heads in _held(engine, number):
            bars.append(Bar(group.name, parts, heads, end, cell))
            end += bars[-1].height + BAR_GAP
        height = max(LEAST_RANK, end - BAR_GAP - top)
        layers = tuple(sorted(held_layers(engine, number)))
        ranks.append(DrawnRank(number, stage, layers, top, height, tuple(bars)))
        top += height
    return tuple(ranks)


def _held(engine: EngineSpec, rank: int) -> Iterator[tuple[GroupSpec, tuple[str, ...], range]]:
    """Each group that the rank has layers of, a state's once for each part."""
    layers = held_layers(engine, rank)
    for group in engine.groups:
        if layers.isdisjoint(group.layers):
            continue
        for parts in [(part,) for part in group.parts] if group.state else [group.parts]:
            num_heads = group.part_shape(parts[0]).num_heads
            yield group, parts, held_heads(rank % engine.tp_size, engine.tp_size, num_heads)
