"""Layouts of memory beyond `RankMemory.allocate`; strides are computed here, axis by axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kvbus.engine import KvCache
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    KvLayout,
    RankSpec,
    Region,
    Segment,
)

NumBlocks = int | Mapping[str, int]
"""One number for every group, or a number by group."""
NHD = KvLayout.parse("NHD")
GAP_BYTES = 96


@dataclass(frozen=True)
class Memory:
    """The order of a cache's axes; K and V in tensors of their own when ``apart``.

    ``padding`` elements that belong to nothing lie behind each index of every axis but the
    innermost, and bytes between the tensors. It is unregistered unless ``direct``, and on a GPU.
    """

    layout: KvLayout = NHD
    apart: bool = False
    padding: int = 0
    direct: bool = True
    device: str = "cpu"

    @property
    def is_plain(self) -> bool:
        return not (self.apart or self.padding)


def rank_of(spec: EngineSpec, rank: int, memory: Memory, num_blocks: Mapping[str, int]) -> RankSpec:
    regions: list[Region] = []
    end = GAP_BYTES
    for group, layers, parts in _tensors(spec, rank, memory):
        shape = group.part_shape(parts[0])
        heads = own_heads(rank % spec.tp_size, spec.tp_size, shape.num_heads)
        sizes = {
            AxisName.BLOCK: num_blocks[group.name],
            AxisName.LAYER: len(layers),
            AxisName.KV: len(parts),
            AxisName.TOKEN: group.block_size,
            AxisName.HEAD: len(heads),
            AxisName.DIM: shape.head_dim,
        }
        axes, size_bytes = _axes(memory, sizes, DTYPE_SIZES_BYTES[group.dtype])
        region = Region(
            segment_id="kv",
            offset_bytes=end,
            group=group.name,
            layers=layers,
            parts=parts,
            first_head=heads[0],
            num_heads=len(heads),
            axes=axes,
        )
        regions.append(region)
        end += size_bytes + GAP_BYTES
        end += -end % 8
    return RankSpec(rank, (Segment("kv", end),), tuple(regions))


def private_cache(spec: EngineSpec, rank: int, memory: Memory, num_blocks: NumBlocks) -> KvCache:
    described = rank_of(spec, rank, memory, by_group(spec, num_blocks))
    size_bytes = described.segments[0].size_bytes
    tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=memory.device)
    return KvCache(spec, described, tensor)


def by_group(spec: EngineSpec, num_blocks: NumBlocks) -> Mapping[str, int]:
    if isinstance(num_blocks, int):
        return dict.fromkeys((group.name for group in spec.groups), num_blocks)
    return num_blocks


def own_heads(tp_rank: int, tp_size: int, num_heads: int) -> range:
    """The heads of a rank: its share, or a replica of its first head."""
    first, stop = tp_rank * num_heads // tp_size, (tp_rank + 1) * num_heads // tp_size
    return range(first, stop) if stop > first else range(first, first + 1)


def own_layers(spec: EngineSpec, rank: int) -> set[int]:
    layers = sorted(chain.from_iterable(group.layers for group in spec.groups))
    stage, num_stages = rank // spec.tp_size, spec.pp_size
    return set(layers[stage * len(layers) // num_stages : (stage + 1) * len(layers) // num_stages])


def all_bytes(view: Tensor) -> Tensor:
    """Every byte of the memory in which a view lies, padding included; not a copy."""
    storage = view.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage)


def _tensors(
    spec: EngineSpec, rank: int, memory: Memory
) -> list[tuple[GroupSpec, tuple[int, ...], tuple[str, ...]]]:
    tensors = []
    for group in spec.groups:
        layers = tuple(layer for layer in group.layers if layer in own_layers(spec, rank))
        together = memory.layout.cross_layer
        lonely = memory.apart or bool(group.state)
        for some in [layers] if together and layers else [(layer,) for layer in layers]:
            tensors += [(group, some, one) for one in _parts(group, lonely)]
    return tensors


def _parts(group: GroupSpec, lonely: bool) -> list[tuple[str, ...]]:
    return [(part,) for part in group.parts] if lonely else [tuple(group.parts)]


def _axes(
    memory: Memory, sizes: Mapping[AxisName, int], itemsize: int
) -> tuple[tuple[Axis, ...], int]:
    """Axes, outermost first, and the bytes of all of it."""
    axes: list[Axis] = []
    stride_bytes = itemsize
    for name in reversed(memory.layout.axes):
        axes.insert(0, Axis(name, sizes[name], stride_bytes))
        stride_bytes = stride_bytes * sizes[name] + memory.padding * itemsize
    return tuple(axes), stride_bytes
