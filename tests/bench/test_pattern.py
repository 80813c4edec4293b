"""Wrong bytes are found, wherever they are."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvbus.bench.pattern import all_words, arrived, wipe
from kvbus.bench.shapes import LAYERED, scattered
from kvbus.bench.words import fill
from kvbus.engine import KvCache
from kvbus.memory.segment import SharedSegment

NUM_BLOCKS = 8
TABLES = scattered(4)


@pytest.fixture
def copied() -> Iterator[KvCache]:
    """A decode cache after a handoff, done by plain copies from view to view."""
    spec, rank = LAYERED.spec("engine"), LAYERED.rank(NUM_BLOCKS)
    size_bytes = rank.segments[0].size_bytes
    with SharedSegment(size_bytes) as ours, SharedSegment(size_bytes) as theirs:
        source, target = KvCache(spec, rank, ours), KvCache(spec, rank, theirs)
        fill(all_words(source))
        wipe(target)
        for region in rank.regions:
            for layer in region.layers:
                for part in region.parts:
                    blocks = source.view(layer, part)[TABLES.prefill]
                    target.view(layer, part)[TABLES.decode] = blocks
        yield target


def test_a_right_copy_has_arrived(copied: KvCache) -> None:
    assert arrived(copied, TABLES.prefill, TABLES.decode)


def test_one_wrong_word_is_noticed(copied: KvCache) -> None:
    landed = np.flatnonzero(all_words(copied))
    all_words(copied)[landed[-1]] ^= np.uint64(1)

    assert not arrived(copied, TABLES.prefill, TABLES.decode)


def test_blocks_in_the_wrong_order_are_noticed(copied: KvCache) -> None:
    assert not arrived(copied, TABLES.prefill[::-1].copy(), TABLES.decode)


def test_nothing_has_arrived_in_a_wiped_cache(copied: KvCache) -> None:
    wipe(copied)

    assert not arrived(copied, TABLES.prefill, TABLES.decode)
