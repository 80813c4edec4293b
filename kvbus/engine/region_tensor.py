"""A region as one torch tensor, whatever its layout."""

from collections.abc import Sequence

import torch

from kvbus.errors import GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, AxisName, EngineSpec, Region

AXES = (AxisName.BLOCK, AxisName.LAYER, AxisName.KV, AxisName.TOKEN, AxisName.HEAD, AxisName.DIM)


def region_tensor(engine: EngineSpec, region: Region, buffer: torch.Tensor) -> torch.Tensor:
    """[block, layer, part, token, head, dim] of the group's dtype, with the region's strides.

    ``buffer`` is the region's segment, one row of uint8. Raises `GeometryError` when it is too
    small.
    """
    return region_view(
        buffer,
        offset_bytes=region.offset_bytes,
        shape=[region.size(axis) for axis in AXES],
        strides_bytes=[region.stride_bytes(axis) for axis in AXES],
        dtype=dtype_from_name(engine.group(region.group).dtype),
    )


def dtype_from_name(name: str) -> torch.dtype:
    """Return torch's dtype for a name on the wire; ``GeometryError`` when there is none."""
    if name not in DTYPE_SIZES_BYTES:
        raise GeometryError(f"dtype {name!r} is none of {', '.join(DTYPE_SIZES_BYTES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def region_view(
    buffer: torch.Tensor,
    *,
    offset_bytes: int,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Lay a tensor over a contiguous uint8 buffer; it shares and keeps alive the memory.

    Raises ``GeometryError`` when the view leaves the buffer or is not aligned to its dtype.
    """
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise GeometryError(
            f"a view needs a contiguous uint8 buffer of one axis, not {buffer.dtype} "
            f"of shape {tuple(buffer.shape)}"
        )
    if len(shape) != len(strides_bytes):
        raise GeometryError(f"{len(shape)} axes but {len(strides_bytes)} strides")
    if min([offset_bytes, *shape, *strides_bytes]) < 0:
        raise GeometryError("offsets, sizes and strides cannot be negative")
    itemsize, end_bytes = dtype.itemsize, offset_bytes
    if 0 not in shape:
        steps = zip(shape, strides_bytes, strict=True)
        end_bytes += itemsize + sum((size - 1) * stride for size, stride in steps)
    if end_bytes > buffer.numel():
        raise GeometryError(
            f"a view that ends at byte {end_bytes} leaves its segment of {buffer.numel()} bytes",
            end_bytes=end_bytes,
            size_bytes=buffer.numel(),
        )
    start_bytes = int(buffer.storage_offset()) + offset_bytes
    distances_bytes = (start_bytes, buffer.data_ptr() + offset_bytes, *strides_bytes)
    if any(distance % itemsize for distance in distances_bytes):
        raise GeometryError(f"the offset or a stride is no multiple of {dtype}'s {itemsize} bytes")
    return torch.empty(0, dtype=dtype, device=buffer.device).set_(
        buffer.untyped_storage(),
        start_bytes // itemsize,
        tuple(shape),
        tuple(stride // itemsize for stride in strides_bytes),
    )
