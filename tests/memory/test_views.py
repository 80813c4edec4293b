"""region_view against numpy's own idea of a strided view, and what it refuses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine.region_tensor import dtype_from_name, region_view
from kvbus.errors import GeometryError

NAMES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def test_a_dtype_is_found_by_its_name_or_refused_with_those_that_are() -> None:
    assert [str(dtype_from_name(name)) for name in NAMES] == [f"torch.{name}" for name in NAMES]
    with pytest.raises(GeometryError, match=r"'float64' is none of float32, float16"):
        dtype_from_name("float64")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, int, list[int], list[int]]:
    """A dtype, an offset, a shape and strides in bytes, aligned but perhaps out of bounds."""
    name = draw(st.sampled_from(NAMES))
    itemsize = dtype_from_name(name).itemsize
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    strides = [draw(st.integers(0, 60)) * itemsize for _ in shape]
    return name, draw(st.integers(0, 200)) * itemsize, shape, strides


@given(layouts())
def test_a_view_holds_the_bytes_that_numpy_finds_there_or_is_refused(
    layout: tuple[str, int, list[int], list[int]],
) -> None:
    name, offset, shape, strides = layout
    dtype = dtype_from_name(name)
    content = np.random.default_rng(0).integers(0, 256, 1024, dtype=np.uint8)
    buffer = torch.from_numpy(np.concatenate([np.zeros(64, np.uint8), content]))[64:]

    asked: Any = {"offset_bytes": offset, "shape": shape, "strides_bytes": strides}
    unsigned = UNSIGNED[dtype.itemsize]
    try:
        expected: Any = np.ndarray(shape, unsigned, content.tobytes(), offset, strides)
    except (ValueError, TypeError):
        with pytest.raises(GeometryError):
            region_view(buffer, **asked, dtype=dtype)
        return
    assert content_of(region_view(buffer, **asked, dtype=dtype)) == expected.tobytes()


def content_of(view: torch.Tensor) -> bytes:
    plain = torch.empty(view.numel(), dtype=view.dtype)
    plain.view(view.shape).copy_(view)
    return plain.view(torch.uint8).numpy().tobytes()


BYTES = torch.zeros(1024, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("buffer", "offset", "shape", "strides", "why"),
    [
        (BYTES, 0, [4, 65], [256, 4], "leaves its segment"),
        (BYTES, 1028, [0], [4], "leaves its segment"),
        (BYTES, 1 << 80, [1], [4], "leaves its segment"),
        (BYTES, 2, [1], [4], "no multiple"),
        (BYTES, 4, [2], [-4], "negative"),
        (BYTES, 0, [1, 1], [4], "2 axes but 1 strides"),
        (BYTES[::2], 0, [1], [4], "contiguous uint8"),
    ],
)
def test_a_view_that_leaves_its_segment_or_cannot_be_is_refused(
    buffer: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int], why: str
) -> None:
    layout = {"shape": shape, "strides_bytes": strides}
    with pytest.raises(GeometryError, match=why):
        region_view(buffer, offset_bytes=offset, **layout, dtype=torch.float32)
