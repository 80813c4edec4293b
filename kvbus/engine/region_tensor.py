"""A region as one torch tensor, whatever its layout."""

import torch

from kvbus.geometry import AxisName, EngineSpec, Region
from kvbus.memory.views import dtype_from_name, region_view

AXES = (
    AxisName.BLOCK,
    AxisName.LAYER,
    AxisName.KV,
    AxisName.TOKEN,
    AxisName.HEAD,
    AxisName.DIM,
)


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
