"""What is handed over: runs of the length that a case is named after, bytes that are compared."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvbus.bench.caches import arrived, fill, wipe
from kvbus.bench.shapes import (
    BIG,
    LAYERED,
    SMALL,
    PairedBlocks,
    Shape,
    contiguous,
    direct_descriptors,
    scattered,
)
from kvbus.bench.sides.cases import CASES, MIB, PairCase
from kvbus.engine import KvCache
from kvbus.memory import SharedSegment

KIB, NUM_BLOCKS = 1024, 8
TABLES = scattered(4, LAYERED)


@pytest.mark.parametrize(
    ("shape", "tables", "run_kib"),
    [
        (BIG, contiguous(8), 8 * 256),
        (BIG, scattered(32, BIG), 256),
        (LAYERED, scattered(32, LAYERED), 16),
        (SMALL, scattered(32, SMALL), 64),
    ],
)
def test_blocks_are_runs_of_one_length(shape: Shape, tables: PairedBlocks, run_kib: int) -> None:
    rows, _ = direct_descriptors(shape, shape, tables)

    assert np.unique(rows.local[:, 1]).tolist() == [run_kib * KIB]
    assert rows.num_bytes == len(tables.prefill) * shape.block_bytes
    assert tables.num_tokens == len(tables.prefill) * shape.block_size


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_between_two_agents_runs_have_the_length_and_a_handoff_the_size_that_is_shown(
    case: PairCase,
) -> None:
    tables = case.tables(4)

    rows, _ = direct_descriptors(case.source, case.target, tables)

    # A few runs have a neighbour on both sides, by chance.
    assert np.median(rows.local[:, 1]) == (case.run_bytes or rows.num_bytes)
    assert rows.num_bytes == (case.source.block_bytes if case.is_one else 4 * MIB)


@pytest.fixture
def copied() -> Iterator[KvCache]:
    """A decode cache after a handoff, done by plain copies from view to view."""
    spec, (rank,) = LAYERED.spec("engine"), LAYERED.ranks(NUM_BLOCKS)
    size_bytes = rank.segments[0].size_bytes
    with SharedSegment(size_bytes) as ours, SharedSegment(size_bytes) as theirs:
        source, target = (KvCache(spec, rank, memory.tensor) for memory in (ours, theirs))
        fill([source])
        wipe([target])
        for region in rank.regions:
            for layer in region.layers:
                for part in region.parts:
                    blocks = source.view(layer, part)[TABLES.prefill]
                    target.view(layer, part)[TABLES.decode] = blocks
        yield target


def nothing(_: KvCache) -> PairedBlocks:
    return TABLES


def change_a_word(cache: KvCache) -> PairedBlocks:
    view = cache.view(LAYERED.num_layers - 1, "v").view(torch.uint8)
    view[TABLES.decode[-1], -1, -1, -1] ^= 1
    return TABLES


def change_the_order(_: KvCache) -> PairedBlocks:
    return replace(TABLES, prefill=TABLES.prefill[::-1].copy())


def wipe_it(cache: KvCache) -> PairedBlocks:
    wipe([cache])
    return TABLES


@pytest.mark.parametrize("damage", [nothing, change_a_word, change_the_order, wipe_it])
def test_wrong_bytes_are_found_wherever_they_are(
    copied: KvCache, damage: Callable[[KvCache], PairedBlocks]
) -> None:
    tables = damage(copied)

    has_arrived = arrived([copied], tables, source_block_size=LAYERED.block_size)

    assert has_arrived == (damage is nothing)
