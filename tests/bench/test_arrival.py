"""Wrong bytes are found, wherever they are."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvbus.bench.caches import arrived, fill, wipe
from kvbus.bench.shapes import LAYERED, PairedBlocks, scattered
from kvbus.engine import KvCache
from kvbus.memory import SharedSegment

NUM_BLOCKS = 8
TABLES = scattered(4, LAYERED)


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


def has_arrived(cache: KvCache, tables: PairedBlocks = TABLES) -> bool:
    return arrived([cache], tables, source_block_size=LAYERED.block_size)


def test_a_right_copy_has_arrived(copied: KvCache) -> None:
    assert has_arrived(copied)


def test_one_wrong_word_is_noticed(copied: KvCache) -> None:
    copied.view(LAYERED.num_layers - 1, "v").view(torch.uint8)[TABLES.decode[-1], -1, -1, -1] ^= 1

    assert not has_arrived(copied)


def test_blocks_in_the_wrong_order_are_noticed(copied: KvCache) -> None:
    swapped = replace(TABLES, prefill=TABLES.prefill[::-1].copy())

    assert not has_arrived(copied, swapped)


def test_nothing_has_arrived_in_a_wiped_cache(copied: KvCache) -> None:
    wipe([copied])

    assert not has_arrived(copied)
