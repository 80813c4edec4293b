"""region_view against numpy's own idea of a strided view, and what it refuses."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.memory import SegmentMapping, SharedSegment, dtype_from_name, region_view

NAMES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_is_found_by_its_name(name: str) -> None:
    assert str(dtype_from_name(name)) == f"torch.{name}"


def test_a_dtype_that_kv_is_not_kept_in_is_refused_with_those_that_are() -> None:
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

    def lay() -> torch.Tensor:
        return region_view(
            buffer, offset_bytes=offset, shape=shape, strides_bytes=strides, dtype=dtype
        )

    unsigned = UNSIGNED[dtype.itemsize]
    try:
        expected: Any = np.ndarray(shape, unsigned, content.tobytes(), offset, strides)
    except (ValueError, TypeError):
        with pytest.raises(GeometryError):
            lay()
        return
    assert content_of(lay()) == expected.tobytes()


def content_of(view: torch.Tensor) -> bytes:
    plain = torch.empty(view.numel(), dtype=view.dtype)
    plain.view(view.shape).copy_(view)
    return plain.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "why"),
    [
        (0, [4, 65], [256, 4], "leaves its segment"),
        (0, [1025], [1], "leaves its segment"),
        (1028, [0], [4], "leaves its segment"),
        (1 << 80, [1], [4], "leaves its segment"),
        (2, [1], [4], "no multiple"),
        (0, [2], [6], "no multiple"),
        (-4, [1], [4], "negative"),
        (4, [2], [-4], "negative"),
        (0, [-1], [4], "negative"),
        (0, [1, 1], [4], "2 axes but 1 strides"),
    ],
)
def test_a_view_that_leaves_its_segment_or_cannot_be_is_refused(
    offset: int, shape: Sequence[int], strides: Sequence[int], why: str
) -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    dtype = torch.uint8 if strides == [1] else torch.float32
    with pytest.raises(GeometryError, match=why):
        region_view(buffer, offset_bytes=offset, shape=shape, strides_bytes=strides, dtype=dtype)


def test_the_last_byte_of_a_segment_belongs_to_it() -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    view = region_view(
        buffer, offset_bytes=512, shape=[2, 64], strides_bytes=[256, 4], dtype=torch.float32
    )
    view[1, 63] = -0.0

    assert buffer[1023] == 0x80


@pytest.mark.parametrize(
    "buffer", [torch.zeros(64), torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(64).byte()[::2]]
)
def test_a_buffer_that_is_not_plain_bytes_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(GeometryError, match="contiguous uint8"):
        region_view(buffer, offset_bytes=0, shape=[1], strides_bytes=[4], dtype=torch.float32)


def test_a_region_of_an_engine_is_seen_through_a_mapping() -> None:
    with SharedSegment(4096) as segment:
        mapping = SegmentMapping(os.dup(segment.fd), size_bytes=4096)
        layout: dict[str, Any] = {"offset_bytes": 256, "shape": [4, 8], "strides_bytes": [64, 2]}
        here = region_view(segment.tensor, **layout, dtype=torch.float16)
        there = region_view(mapping.tensor, **layout, dtype=torch.float16)
        here.fill_(1.5)

        assert torch.equal(there, torch.full((4, 8), 1.5, dtype=torch.float16))
        mapping.unmap()
        assert not there.any()
