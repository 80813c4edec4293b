"""The memory of one rank."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from kvbus.engine.storage import CudaStorage, SharedStorage, ordinal_of, share_tensors
from kvbus.errors import GeometryError, LocalError, SegmentError
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
    check_axes,
    held_heads,
    held_layers,
    lay_out_rank,
    validate_rank,
)
from kvbus.memory.cuda import GpuAllocation, GpuMemory
from kvbus.memory.segment import HugePages, SharedSegment, shmem_policy

log = logging.getLogger("kvbus.engine")

Storage = SharedStorage | CudaStorage | SharedSegment | GpuAllocation | GpuMemory
Place = tuple[int | str, str] | tuple[int, str] | tuple[str, str] | int | str
"""A layer, or a group for all of its layers; with one part, or for all."""
P = TypeVar("P", bound=Place)


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, and the storages that an agent maps, by segment id.

    `describe_tensors` makes it of an engine's tensors, `allocate` makes a new cache. With
    ``direct`` False, NIXL and the NIC never pin it: its KV passes through the agent's slots.
    """

    rank: RankSpec
    storages: Mapping[str, Storage]
    direct: bool = True

    @classmethod
    def allocate(
        cls,
        engine: EngineSpec,
        rank: int,
        layout: KvLayout,
        *,
        num_blocks: int | Mapping[str, int],
        device: torch.device | str = "cpu",
        direct: bool = True,
        huge_pages: HugePages = False,
    ) -> "RankMemory":
        """Allocate zeroed memory for the rank's whole KV cache; `KvCache` gives views of it.

        ``num_blocks`` is for all groups, or by group. It logs a warning if the machine has no
        ``huge_pages``. Raises `SegmentError` for lack of memory and for other devices.
        """
        spec = lay_out_rank(engine, rank, layout, num_blocks=num_blocks)
        (segment,) = spec.segments
        where = torch.device(device)
        storage: Storage
        if where.type == "cuda":
            storage = GpuAllocation(segment.size_bytes, ordinal_of(where))
        elif where.type == "cpu":
            storage = _allocate_shared(engine, spec, huge_pages=huge_pages)
        else:
            raise SegmentError(
                f"no agent can open memory of {where}: use cpu, a cuda device, or a buffer of host "
                "blocks"
            )
        return cls(spec, {segment.segment_id: storage}, direct)

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes that `allocate` made, as uint8. Raises `LocalError` for other memory."""
        (storage,) = self.storages.values()
        if isinstance(storage, SharedSegment):
            return storage.tensor
        if isinstance(storage, GpuAllocation):
            return torch.as_tensor(storage, device=f"cuda:{storage.memory.ordinal}")
        raise LocalError("this memory was not allocated here: its tensors are the engine's")

    def close(self) -> None:
        """Close the descriptors, as a `Link` does when it closes; tensors stay valid."""
        for storage in self.storages.values():
            storage.close()


class KvCache:
    """Views of a rank's KV cache in ``buffer``, such as `RankMemory.tensor` (one row of uint8)."""

    def __init__(self, engine: EngineSpec, rank: RankSpec, buffer: torch.Tensor) -> None:
        self.rank = rank
        self._views: dict[tuple[int, str], torch.Tensor] = {}
        for region in rank.regions:
            tensor = region_tensor(engine, region, buffer)
            for number, layer in enumerate(region.layers):
                for at, part in enumerate(region.parts):
                    self._views[layer, part] = tensor[:, number, at]

    def view(self, layer: int, part: str) -> torch.Tensor:
        """Return a part of a layer as [block, token, head, dim], with the layout's strides.

        A state is [block, 1, unit, byte of a unit] in uint8. Raises `KeyError` for a layer of
        another rank.
        """
        return self._views[layer, part]


def region_tensor(engine: EngineSpec, region: Region, buffer: torch.Tensor) -> torch.Tensor:
    """Return [block, layer, part, token, head, dim], in the region's dtype and strides.

    It shares ``buffer``, the segment as uint8. Raises `GeometryError`.
    """
    name = engine.group(region.group).dtype
    itemsize, dtype = DTYPE_SIZES_BYTES[name], getattr(torch, name)
    at_bytes = int(buffer.storage_offset()) + region.offset_bytes
    strides_bytes = [region.stride_bytes(axis) for axis in AxisName]
    if any(step % itemsize for step in (at_bytes, *strides_bytes)):
        raise GeometryError(f"the offset or a stride is no multiple of {dtype}'s {itemsize} bytes")
    try:
        return torch.empty(0, dtype=dtype, device=buffer.device).set_(
            buffer.untyped_storage(),
            at_bytes // itemsize,
            [region.size(axis) for axis in AxisName],
            [step // itemsize for step in strides_bytes],
        )
    except RuntimeError as error:
        raise GeometryError(f"a region leaves its segment: {error}") from error


def describe_tensors(
    tensors: Mapping[P, torch.Tensor],
    axes: str | Mapping[str, str] = "block token head dim",
    *,
    engine: EngineSpec,
    rank: int = 0,
    direct: bool = True,
) -> RankMemory:
    """Share the engine's own tensors as the memory of ``rank``.

    Keys are ``(layer, part)`` such as ``(0, "k")``, or a layer for all parts along the axis ``kv``.
    A group's name means all of its layers, along the axis ``layer``. ``axes`` names the axes of
    each tensor in order, for all groups or by group: ``block``, ``layer``, ``kv``, ``token``,
    ``head``, ``dim``; absent ones have size 1. Views may have any strides: ``unflatten`` a combined
    axis of blocks and tokens. A state has ``block``, ``head`` for its units, and ``dim``.

    CPU tensors move to shared memory in place, and only their addresses change. Call it while no
    work runs, and before anything keeps an address. All tensors are checked before any moves.
    Raises `GeometryError` for a wrong tensor or a missing layer, and `SegmentError` for memory that
    cannot be shared.
    """
    names: dict[int, str] = {}
    sizes: dict[str, int] = {}
    regions = []
    for place, tensor in tensors.items():
        storage = tensor.untyped_storage()
        name = names.setdefault(storage.data_ptr(), f"kv{len(names)}")
        sizes[name] = storage.nbytes()
        try:
            held = _find(engine, rank, place)
            order = axes if isinstance(axes, str) else axes.get(held.group.name, "")
            region = Region(
                segment_id=name,
                offset_bytes=tensor.data_ptr() - storage.data_ptr(),
                group=held.group.name,
                layers=held.layers,
                parts=held.parts,
                first_head=held.heads.start,
                num_heads=len(held.heads),
                axes=_axes(held.group, order.split(), tensor),
            )
            check_axes(held.group, region, "its region")
        except GeometryError as error:
            message = f"tensor {place!r} of shape {tuple(tensor.shape)}: {error.message}"
            raise GeometryError(message, field=str(error.detail.get("field", ""))) from error
        regions.append(region)
    segments = tuple(map(Segment, sizes.keys(), sizes.values()))
    spec = RankSpec(rank, segments, tuple(regions))
    validate_rank(engine, spec)
    shared = share_tensors(tensors.values())
    return RankMemory(spec, dict(zip(sizes, shared, strict=True)), direct)


class _Held(NamedTuple):
    group: GroupSpec
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    heads: range


def _find(engine: EngineSpec, rank: int, place: Place) -> _Held:
    where, part = place if isinstance(place, tuple) else (place, None)
    groups = [
        group
        for group in engine.groups
        if where == group.name or (where in group.layers and (part is None or part in group.parts))
    ]
    if len(groups) != 1:
        raise GeometryError(f"{where!r} is a layer, or the name, of {len(groups)} groups, not of 1")
    (group,) = groups
    if part not in (None, *group.parts):
        raise GeometryError(f"the parts of '{group.name}' are {', '.join(group.parts)}")
    stage = held_layers(engine, rank) if engine.pp_size > 1 else frozenset(group.layers)
    held = tuple(layer for layer in group.layers if layer in stage)
    parts = group.parts if part is None else (part,)
    num_heads = group.part_shape(parts[0]).num_heads
    heads = held_heads(rank % engine.tp_size, engine.tp_size, num_heads)
    return _Held(group, held if where == group.name else (int(where),), parts, heads)


def _axes(group: GroupSpec, names: list[str], tensor: torch.Tensor) -> tuple[Axis, ...]:
    """A state's tensor may have any dtype: its axes are in bytes."""
    known = {axis.value for axis in AxisName}
    if unknown := [name for name in names if name not in known]:
        raise GeometryError(
            f"unknown axis {unknown[0]!r}: the axes are {', '.join(sorted(known))}", field="axes"
        )
    if len(names) != tensor.dim() or len(set(names)) != len(names):
        raise GeometryError(
            f"its {tensor.dim()} axes are not '{' '.join(names)}', each once", field="axes"
        )
    itemsize, dtype = tensor.element_size(), str(tensor.dtype).removeprefix("torch.")
    if not group.state and dtype not in (group.dtype, "uint8", "int8"):
        raise GeometryError(
            f"it is of {dtype}, group '{group.name}' of {group.dtype}", field="dtype"
        )
    axes = []
    for name, size, step in zip(map(AxisName, names), tensor.shape, tensor.stride(), strict=True):
        if group.state and name is AxisName.DIM and itemsize > 1:
            if step != 1 and size > 1:
                raise GeometryError("the elements of a unit do not follow each other", field="axes")
            axes.append(Axis(name, size * itemsize, 1))
        else:
            axes.append(Axis(name, size, step * itemsize))
    return tuple(sorted(axes, key=lambda axis: -axis.stride_bytes))


def _allocate_shared(engine: EngineSpec, rank: RankSpec, *, huge_pages: HugePages) -> SharedSegment:
    size_bytes = rank.segments[0].size_bytes
    segment = SharedSegment(size_bytes, name=f"kvbus-{engine.engine_id}", huge_pages=huge_pages)
    if huge_pages and not segment.uses_huge_pages:
        log.warning(
            "the KV cache of rank %d of '%s' has ordinary pages: this machine gives no huge ones "
            "(shmem_enabled is '%s'; see kvbus doctor)",
            rank.rank,
            engine.engine_id,
            shmem_policy(),
        )
    return segment
