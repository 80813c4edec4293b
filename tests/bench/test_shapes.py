"""The cases move runs of the length that their names promise."""

import numpy as np
import pytest

from kvbus.bench.shapes import (
    BIG,
    LAYERED,
    SMALL,
    Shape,
    contiguous,
    direct_descriptors,
    scattered,
)

KIB = 1024


def test_blocks_in_order_are_one_run() -> None:
    rows, _ = direct_descriptors(BIG, BIG, contiguous(8))

    assert rows.local[:, 1].tolist() == [8 * 256 * KIB]


@pytest.mark.parametrize(("shape", "run_kib"), [(BIG, 256), (LAYERED, 16), (SMALL, 64)])
def test_scattered_blocks_are_runs_of_one_length(shape: Shape, run_kib: int) -> None:
    rows, _ = direct_descriptors(shape, shape, scattered(32, shape))

    assert np.unique(rows.local[:, 1]).tolist() == [run_kib * KIB]
    assert rows.num_bytes == 32 * shape.block_bytes


def test_a_request_has_the_tokens_of_its_blocks() -> None:
    assert contiguous(3).num_tokens == 48
