"""Specs of an engine, its groups, its ranks and their regions, as they travel on the wire.

Refuses to check itself: a spec is plain data, `kvbus.geometry.validation` says whether it can be.

Axes of a region, in whatever order memory has them:
    block   num_blocks of the rank's cache       token   slots within one block
    layer   the region's layers, in `layers`      kv      the region's parts, in `parts`
    head    the region's KV heads                 dim     elements of one head
"""

from enum import StrEnum
from typing import Annotated

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
    """What a region holds along its kv axis."""

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
    parts: Annotated[tuple[KvPart, ...], msgspec.Meta(min_length=1, max_length=2)]
    first_head: Index
    num_heads: Count
    axes: Annotated[tuple[Axis, ...], msgspec.Meta(min_length=1, max_length=6)]

    def size(self, name: AxisName) -> int:
        """Number of indices along ``name``; 1 when the region does not have that axis."""
        return next((axis.size for axis in self.axes if axis.name is name), 1)

    def stride_bytes(self, name: AxisName) -> int:
        """Bytes from one index of ``name`` to the next; 0 when the region lacks the axis."""
        return next((axis.stride_bytes for axis in self.axes if axis.name is name), 0)


class GroupSpec(msgspec.Struct, frozen=True):
    """Layers that share a block table.

    ``block_size`` counts tokens, ``head_dim`` elements, ``window`` tokens (None: full attention).
    ``parts`` is what each layer caches: K and V, or one latent (MLA).
    """

    name: Name
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    block_size: Count
    num_kv_heads: Count
    head_dim: Count
    dtype: Name
    parts: Annotated[tuple[KvPart, ...], msgspec.Meta(min_length=1, max_length=2)] = (
        KvPart.KEY,
        KvPart.VALUE,
    )
    window: Count | None = None


class EngineSpec(msgspec.Struct, frozen=True):
    """What both sides must know of an engine before any byte moves.

    ``model`` names weights and revision: two engines exchange KV only when it is equal.
    """

    engine_id: Name
    model: Name
    tp_size: Count
    groups: Annotated[tuple[GroupSpec, ...], msgspec.Meta(min_length=1, max_length=64)]

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
