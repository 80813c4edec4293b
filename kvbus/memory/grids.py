"""Grids: layers and parts of a rank that lie at equal steps, so that one view has them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvbus.errors import GeometryError
from kvbus.geometry import AxisName, Region

RegionOf = Mapping[tuple[int, str], Region]
"""The one region of each layer and part."""


class GridSteps(NamedTuple):
    """What regions of one grid have in common: their segment, and bytes along the other axes."""

    segment_id: str
    block_bytes: int
    token_bytes: int
    head_bytes: int
    dim_bytes: int


class Run(NamedTuple):
    """Indices ``first`` to ``first + num`` that lie ``step_bytes`` apart."""

    first: int
    num: int
    step_bytes: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Layers x parts of a box that lie at equal steps in one segment.

    ``layers`` and ``parts`` count within the box. ``origin_bytes`` is where the first of both
    has the box's first head, in token 0 of block 0.
    """

    steps: GridSteps
    origin_bytes: int
    layers: Run
    parts: Run

    @property
    def unit_bytes(self) -> tuple[int, int, int, int, int]:
        """Bytes from layer to layer, and so on for parts, tokens, heads and dims."""
        steps = self.steps
        return (
            self.layers.step_bytes,
            self.parts.step_bytes,
            steps.token_bytes,
            steps.head_bytes,
            steps.dim_bytes,
        )


def map_regions(regions: Iterable[Region]) -> RegionOf:
    """The region of each layer and part; `validate_rank` says that there is only one."""
    return {
        (layer, part): region
        for region in regions
        for layer in region.layers
        for part in region.parts
    }


def find_grids(
    region_of: RegionOf, layers: tuple[int, ...], parts: tuple[str, ...], heads: tuple[int, int]
) -> tuple[Grid, ...]:
    """As few grids as greedy looking gives; ``heads`` is first and one-past-last.

    Raises `GeometryError` when the rank lacks one of them.
    """
    columns: dict[tuple[GridSteps, int], list[tuple[int, int]]] = defaultdict(list)
    for number, part in enumerate(parts):
        for index, layer in enumerate(layers):
            region = _region(region_of, layer, part, heads)
            corner = _corner(region, layer, part, heads[0])
            columns[_steps(region), number].append((index, corner))
    rows: dict[tuple[GridSteps, Run], list[tuple[int, int]]] = defaultdict(list)
    for (steps, number), corners in columns.items():
        for layers_run, origin in _runs(corners):
            rows[steps, layers_run].append((number, origin))
    return tuple(
        Grid(steps, origin, layers_run, parts_run)
        for (steps, layers_run), corners in rows.items()
        for parts_run, origin in _runs(corners)
    )


def _region(region_of: RegionOf, layer: int, part: str, heads: tuple[int, int]) -> Region:
    region = region_of.get((layer, part))
    if region is None:
        raise GeometryError(f"this rank does not hold layer {layer}, '{part}'", field="layers")
    held = region.first_head, region.first_head + region.num_heads
    if heads[0] < held[0] or held[1] < heads[1]:
        raise GeometryError(
            f"this rank holds heads {held[0]} to {held[1]} of layer {layer}, '{part}', "
            f"not {heads[0]} to {heads[1]}",
            field="first_head",
        )
    return region


def _corner(region: Region, layer: int, part: str, first_head: int) -> int:
    return (
        region.offset_bytes
        + region.layers.index(layer) * region.stride_bytes(AxisName.LAYER)
        + region.parts.index(part) * region.stride_bytes(AxisName.KV)
        + (first_head - region.first_head) * region.stride_bytes(AxisName.HEAD)
    )


def _steps(region: Region) -> GridSteps:
    axes = (AxisName.BLOCK, AxisName.TOKEN, AxisName.HEAD, AxisName.DIM)
    return GridSteps(region.segment_id, *(region.stride_bytes(axis) for axis in axes))


def _runs(corners: list[tuple[int, int]]) -> Iterator[tuple[Run, int]]:
    """(index, origin) in ascending index, cut where the index jumps or the step is another one.

    Each with its first origin. A step is above 0: torch has no views that go backwards.
    """
    run, start = Run(corners[0][0], 1, 0), corners[0][1]
    last = start
    for index, origin in corners[1:]:
        step, follows = origin - last, index == run.first + run.num
        if follows and step > 0 and run.step_bytes in (0, step):
            run = Run(run.first, run.num + 1, step)
        else:
            yield run, start
            run, start = Run(index, 1, 0), origin
        last = origin
    yield run, start
