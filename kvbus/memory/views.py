"""Owns the torch views of a segment: the names of dtypes, and tensors laid over its bytes.

Shapes are in elements of the view's dtype, strides in bytes, as a region's description says them.
"""

from collections.abc import Sequence

import torch

from kvbus.errors import GeometryError
from kvbus.memory.cuda_mapping import CudaMapping
from kvbus.memory.mapping import SegmentMapping

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def dtype_from_name(name: str) -> torch.dtype:
    """Return torch's dtype for a name on the wire; ``GeometryError`` when there is none."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise GeometryError(f"dtype {name!r} is none of {', '.join(_DTYPES)}") from None


def mapping_tensor(mapping: SegmentMapping | CudaMapping) -> torch.Tensor:
    """Return all bytes of the mapping as a writable uint8 tensor."""
    if isinstance(mapping, CudaMapping):
        return mapping.tensor
    return torch.from_numpy(mapping.view())


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
    _check_buffer(buffer)
    _check_layout(shape, strides_bytes, offset_bytes)
    end_bytes = offset_bytes + _extent_bytes(shape, strides_bytes, dtype.itemsize)
    if end_bytes > buffer.numel():
        raise GeometryError(
            f"a view that ends at byte {end_bytes} leaves its segment of {buffer.numel()} bytes",
            end_bytes=end_bytes,
            size_bytes=buffer.numel(),
        )
    start_bytes = int(buffer.storage_offset()) + offset_bytes
    _check_alignment([start_bytes, buffer.data_ptr() + offset_bytes, *strides_bytes], dtype)
    return torch.empty(0, dtype=dtype, device=buffer.device).set_(
        buffer.untyped_storage(),
        start_bytes // dtype.itemsize,
        tuple(shape),
        tuple(stride // dtype.itemsize for stride in strides_bytes),
    )


def _check_buffer(buffer: torch.Tensor) -> None:
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise GeometryError(
            f"a view needs a contiguous uint8 buffer of one axis, not {buffer.dtype} "
            f"of shape {tuple(buffer.shape)}"
        )


def _check_layout(shape: Sequence[int], strides_bytes: Sequence[int], offset_bytes: int) -> None:
    if len(shape) != len(strides_bytes):
        raise GeometryError(f"{len(shape)} axes but {len(strides_bytes)} strides")
    if min([offset_bytes, *shape, *strides_bytes]) < 0:
        raise GeometryError("offsets, sizes and strides cannot be negative")


def _extent_bytes(shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> int:
    """How many bytes from the first byte of the first element to the end of the last one."""
    if 0 in shape:
        return 0
    steps = zip(shape, strides_bytes, strict=True)
    return itemsize + sum((size - 1) * stride for size, stride in steps)


def _check_alignment(distances_bytes: Sequence[int], dtype: torch.dtype) -> None:
    if any(distance % dtype.itemsize for distance in distances_bytes):
        raise GeometryError(
            f"the offset or a stride is no multiple of {dtype}'s {dtype.itemsize} bytes"
        )
