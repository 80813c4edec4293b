"""Specs of an engine, its groups, its ranks and their regions, as they travel on the wire.

Whether a spec can be is said by `kvbus.geometry.validation`.

Axes of a region, in whatever order memory has them:
    block   num_blocks of the rank's cache       token   slots within one block
    layer   the region's layers, in `layers`      kv      the region's parts, in `parts`
    head    the region's KV heads                 dim     elements of one head
"""

from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
SizeBytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

DTYPE_SIZES_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class AxisName(StrEnum):
    """What moving along one axis of a region changes."""

    BLOCK = "block"
    LAYER = "layer"
    KV = "kv"
    TOKEN = "token"
    HEAD = "head"
    DIM = "dim"


class KvPart(StrEnum):
    """What attention caches along the kv axis; a state group names parts of its own."""

    KEY = "k"
    VALUE = "v"
    LATENT = "latent"


class Axis(msgspec.Struct, frozen=True):
    """One axis: its name, its size, and the bytes from one index to the next."""

    name: AxisName
    size: Count
    stride_bytes: SizeBytes


class Segment(msgspec.Struct, frozen=True):
    """One shared memory object of a rank; `segment_id` is unique within the rank."""

    segment_id: Name
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class Region(msgspec.Struct, frozen=True):
    """The memory of one tensor on one rank: of one layer, or of several (cross-layer blocks).

    Element (block b, layer l, part p, token t, head h, dim d) starts at ``offset_bytes`` of the
    segment plus the sum of index * stride over the axes; an axis that is absent has size 1.
    """

    segment_id: Name
    offset_bytes: SizeBytes
    group: Name
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    parts: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)]
    first_head: Index
    num_heads: Count
    axes: Annotated[tuple[Axis, ...], msgspec.Meta(min_length=1, max_length=6)]

    def size(self, name: AxisName) -> int:
        """Number of indices along ``name``; 1 when the region does not have that axis."""
        return next((axis.size for axis in self.axes if axis.name is name), 1)

    def stride_bytes(self, name: AxisName) -> int:
        """Bytes from one index of ``name`` to the next; 0 when the region lacks the axis."""
        return next((axis.stride_bytes for axis in self.axes if axis.name is name), 0)


class StatePart(msgspec.Struct, frozen=True):
    """One named part of an opaque state: ``num_units`` of ``unit_bytes`` each, for each layer.

    Units are to a state what KV heads are to attention: rank r of tp_size holds those from
    r * num_units // tp_size on. A part of one unit is held whole by every rank.
    """

    name: Name
    num_units: Count
    unit_bytes: Count


class PartShape(NamedTuple):
    """Heads of one part of a group, over all ranks, and elements of one head."""

    num_heads: int
    head_dim: int


class GroupSpec(msgspec.Struct, frozen=True):
    """Layers that share a block table.

    ``block_size`` counts tokens, ``head_dim`` elements, ``window`` tokens (None: full attention).
    ``parts`` is what each layer caches: K and V, or one latent (MLA).
    A group with ``state`` is opaque, as of a recurrent layer: see `state_group`.
    """

    name: Name
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    block_size: Count
    num_kv_heads: Count
    head_dim: Count
    dtype: Name
    parts: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)] = (
        KvPart.KEY,
        KvPart.VALUE,
    )
    window: Count | None = None
    state: Annotated[tuple[StatePart, ...], msgspec.Meta(max_length=64)] = ()

    def part_shape(self, part: str) -> PartShape:
        """Heads and head size of ``part``; units and their bytes, if it is one of a state.

        Raises `KeyError` when a state has no such part.
        """
        if not self.state:
            return PartShape(self.num_kv_heads, self.head_dim)
        for one in self.state:
            if one.name == part:
                return PartShape(one.num_units, one.unit_bytes)
        raise KeyError(part)

    def positions(self, start: int, stop: int) -> tuple[int, int]:
        """Which positions of the block table tokens [start, stop) of a request of ``stop`` need.

        All of them; of a group with a window those among the last ``window`` tokens; of a state
        the only one. Equal bounds mean none.
        """
        if stop <= start:
            return start, start
        if self.state:
            return 0, 1
        if self.window is not None:
            start = max(start, stop - self.window)
        return start, stop


def state_group(name: str, layers: tuple[int, ...], parts: tuple[StatePart, ...]) -> GroupSpec:
    """A group whose memory is opaque bytes, one block for a request, whatever its length.

    The bytes are moved as they are once the offer is sealed: a state is that of the last token.
    """
    names = tuple(part.name for part in parts)
    return GroupSpec(name, layers, 1, 1, 1, "uint8", names, None, parts)


class EngineSpec(msgspec.Struct, frozen=True):
    """What both sides must know of an engine before any byte moves.

    ``model`` names weights and revision: two engines exchange KV only when it is equal. Rank
    numbers count tensor parallel ranks first: ``stage * tp_size + tp_rank``.
    """

    engine_id: Name
    model: Name
    tp_size: Count
    groups: Annotated[tuple[GroupSpec, ...], msgspec.Meta(min_length=1, max_length=64)]
    pp_size: Count = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all pipeline stages."""
        return self.tp_size * self.pp_size

    def group(self, name: str) -> GroupSpec:
        """The group called ``name``; raises `KeyError` when there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)


class RankSpec(msgspec.Struct, frozen=True):
    """One rank's memory: its segments and the regions inside them."""

    rank: Index
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(min_length=1, max_length=4096)]
    regions: Annotated[tuple[Region, ...], msgspec.Meta(min_length=1, max_length=16384)]


def head_interval(rank: int, tp_size: int, num_kv_heads: int) -> tuple[int, int]:
    """First and one-past-last global KV head that ``rank`` of ``tp_size`` computes.

    Empty (both equal) for a rank without a head of its own, which happens when ranks outnumber
    heads.
    """
    return rank * num_kv_heads // tp_size, (rank + 1) * num_kv_heads // tp_size


def layer_interval(stage: int, pp_size: int, num_layers: int) -> tuple[int, int]:
    """First and one-past-last layer, by order, of pipeline stage ``stage`` when split evenly."""
    return stage * num_layers // pp_size, (stage + 1) * num_layers // pp_size
