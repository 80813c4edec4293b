"""region_tensor against numpy's own idea of a strided view, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine.rank_memory import region_tensor
from kvbus.errors import GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, Axis, AxisName, EngineSpec, GroupSpec, Region

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, int, list[int], list[int]]:
    """A dtype, an offset, six sizes and strides in bytes, aligned but perhaps out of bounds."""
    name = draw(st.sampled_from(list(DTYPE_SIZES_BYTES)))
    itemsize = DTYPE_SIZES_BYTES[name]
    sizes = draw(st.lists(st.integers(1, 4), min_size=6, max_size=6))
    strides = [draw(st.integers(0, 60)) * itemsize for _ in sizes]
    return name, draw(st.integers(0, 200)) * itemsize, sizes, strides


def view_of(
    buffer: torch.Tensor, dtype: str, offset: int, sizes: list[int], strides: list[int]
) -> torch.Tensor:
    axes = tuple(map(Axis, AxisName, sizes, strides))
    region = Region("kv", offset, "full", (0,), ("k",), 0, 1, axes)
    group = GroupSpec("full", (0,), 1, 1, 1, dtype)
    return region_tensor(EngineSpec("e", "m", 1, (group,)), region, buffer)


@given(layouts())
def test_view_is_as_numpys_or_refused(layout: tuple[str, int, list[int], list[int]]) -> None:
    name, offset, sizes, strides = layout
    content = np.random.default_rng(0).integers(0, 256, 1024, dtype=np.uint8)
    buffer = torch.from_numpy(np.concatenate([np.zeros(64, np.uint8), content]))[64:]

    unsigned = UNSIGNED[DTYPE_SIZES_BYTES[name]]
    try:
        expected: Any = np.ndarray(sizes, unsigned, content.tobytes(), offset, strides)
    except (ValueError, TypeError):
        with pytest.raises(GeometryError, match="leaves its segment"):
            view_of(buffer, *layout)
        return
    view = view_of(buffer, *layout)
    plain = torch.empty(view.numel(), dtype=view.dtype)
    plain.view(view.shape).copy_(view)
    assert plain.view(torch.uint8).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(("offset", "stride"), [(2, 4), (4, 6)])
def test_a_view_between_two_numbers_is_refused(offset: int, stride: int) -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(GeometryError, match="no multiple"):
        view_of(buffer, "float32", offset, [2, 1, 1, 1, 1, 1], [stride, 4, 4, 4, 4, 4])
