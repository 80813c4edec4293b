"""Specs of an engine, its groups, ranks and regions, as sent on the wire."""

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
    """Axes of a region.

    - ``block``: blocks of the rank's cache
    - ``layer``, ``kv``, ``head``: the region's ``layers``, ``parts`` and KV heads, in their order
    - ``token``: slots of one block
    - ``dim``: elements of one head
    """

    BLOCK = "block"
    LAYER = "layer"
    KV = "kv"
    TOKEN = "token"
    HEAD = "head"
    DIM = "dim"


class KvPart(StrEnum):
    """Parts of attention along the kv axis; a state group has its own."""

    KEY = "k"
    VALUE = "v"
    LATENT = "latent"


class Axis(msgspec.Struct, frozen=True):
    """One axis of a region."""

    name: AxisName
    size: Count
    stride_bytes: SizeBytes


class Segment(msgspec.Struct, frozen=True):
    """One shared memory object."""

    segment_id: Name
    """Unique within the rank."""
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class Region(msgspec.Struct, frozen=True):
    """The memory of one tensor on one rank, of one layer or of several; see
    [Memory](protocol-engine.md#memory).
    """

    segment_id: Name
    offset_bytes: SizeBytes
    """First element."""
    group: Name
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """Along the layer axis, in that order."""
    parts: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)]
    """Along the kv axis, in that order."""
    first_head: Index
    """First global KV head, or unit of a state."""
    num_heads: Count
    axes: Annotated[tuple[Axis, ...], msgspec.Meta(min_length=1, max_length=6)]
    """None twice. An axis of size 1 may be absent."""

    def size(self, name: AxisName) -> int:
        return next((axis.size for axis in self.axes if axis.name is name), 1)

    def stride_bytes(self, name: AxisName) -> int:
        return next((axis.stride_bytes for axis in self.axes if axis.name is name), 0)


class StatePart(msgspec.Struct, frozen=True):
    """One named part of an opaque state. Its units are like KV heads."""

    name: Name
    """Unique in the group."""
    num_units: Count
    """For one layer, over all ranks of a stage. 1: each rank holds all of it."""
    unit_bytes: Count


class PartShape(NamedTuple):
    """Heads over all ranks, and elements of one head."""

    num_heads: int
    head_dim: int


class GroupSpec(msgspec.Struct, frozen=True):
    """Layers that share a block table; with ``state``, opaque bytes."""

    name: Name
    """The same on both sides."""
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """In the model's counting; 0 for a state of no layer."""
    block_size: Count
    """In tokens."""
    num_kv_heads: Count
    """Over all ranks; 1 for a latent."""
    head_dim: Count
    """Elements of one head, or of the latent."""
    dtype: Name
    """``float32``, ``float16``, ``bfloat16``, ``float8_e4m3fn``, ``float8_e5m2``, ``int8`` or
    ``uint8``."""
    parts: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)] = (
        KvPart.KEY,
        KvPart.VALUE,
    )
    """``k`` and ``v``, or ``latent`` (MLA), or others, all of one shape."""
    window: Count | None = None
    """Tokens of a sliding window."""
    state: Annotated[tuple[StatePart, ...], msgspec.Meta(max_length=64)] = ()
    """The parts of an [opaque state](protocol-engine.md#memory), for which most of the above is
    fixed."""
    optional: bool = False
    """The other side may be without this group."""

    def part_shape(self, part: str) -> PartShape:
        """Return heads and elements per head; for a state, units and bytes per unit.

        Raises `KeyError` for an unknown part of a state.
        """
        if not self.state:
            return PartShape(self.num_kv_heads, self.head_dim)
        for one in self.state:
            if one.name == part:
                return PartShape(one.num_units, one.unit_bytes)
        raise KeyError(part)

    def head_bytes(self, part: str) -> int:
        return self.part_shape(part).head_dim * DTYPE_SIZES_BYTES[self.dtype]

    def positions(self, start: int, stop: int) -> tuple[int, int]:
        """Return the positions that tokens [start, stop) of a request of ``stop`` tokens need."""
        if stop <= start:
            return start, start
        if self.state:
            return 0, 1
        if self.window is not None:
            start = max(start, stop - self.window)
        return start, stop


def state_group(
    name: str, layers: tuple[int, ...], parts: tuple[StatePart, ...], *, optional: bool = False
) -> GroupSpec:
    """Return a group of opaque bytes: one block per request, of any length.

    Without ``layers`` the state belongs to no layer. If ``optional``, the other side may lack it.
    """
    names = tuple(part.name for part in parts)
    return GroupSpec(name, layers or (0,), 1, 1, 1, "uint8", names, None, parts, optional)


class EngineSpec(msgspec.Struct, frozen=True):
    """Shape of an engine, known to both sides."""

    engine_id: Name
    """Unique at its agent."""
    model: Name
    """Weights and revision. KV is exchanged only between equal ones."""
    tp_size: Count
    """Ranks of one pipeline stage."""
    groups: Annotated[tuple[GroupSpec, ...], msgspec.Meta(min_length=1, max_length=64)]
    """No part of a layer is in two, except in states."""
    pp_size: Count = 1
    """Pipeline stages. Rank numbers are ``stage * tp_size`` + number within."""

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    def group(self, name: str) -> GroupSpec:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)


class RankSpec(msgspec.Struct, frozen=True):
    """The memory of one worker of an engine."""

    rank: Index
    """Below ``tp_size * pp_size``."""
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """With ids that differ."""
    regions: Annotated[tuple[Region, ...], msgspec.Meta(min_length=1, max_length=16384)]

    @property
    def num_blocks(self) -> dict[str, int]:
        return {region.group: region.size(AxisName.BLOCK) for region in self.regions}


class Tile(msgspec.Struct, frozen=True):
    """Layers x parts x positions [``start``, ``stop``) x heads of one group; see
    [Packed reads](protocol-agents.md#packed-reads). Positions are those of the group's block
    table; for all but a state these are tokens.
    """

    group: Name
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """In the order along the layer axis, none twice."""
    parts: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)]
    """With heads of one size, in the order along the kv axis, none twice."""
    first_head: Index
    num_heads: Count
    start: Index
    stop: Index
    """Over ``start``."""
