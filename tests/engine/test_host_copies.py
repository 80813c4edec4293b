"""What is copied between a device's blocks and the host's: each slot of the span, once."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbus.engine.bounce.request_blocks import cut_into_copies
from kvbus.geometry import BlockTable, GroupSpec


@st.composite
def cases(draw):
    """A span, and two tables that hold it, the host's with runs."""
    block_size = draw(st.sampled_from([1, 2, 5, 16]))
    first_block = draw(st.integers(0, 3))
    num_blocks = draw(st.integers(1, 12))
    lowest, highest = first_block * block_size, (first_block + num_blocks) * block_size
    start = draw(st.integers(lowest, highest))
    stop = draw(st.integers(start, highest))
    random = draw(st.randoms(use_true_random=False))
    device = random.sample(range(50), num_blocks)
    host = sorted(random.sample(range(20), num_blocks))
    if random.random() < 0.3:
        random.shuffle(host)
    return block_size, first_block, device, host, (start, stop)


@given(cases())
def test_every_position_goes_from_its_device_slot_to_its_ring_slot_once(case):
    block_size, first_block, device, host, (start, stop) = case

    copies = _cut(case)

    wanted = []
    for position in range(start, stop):
        block, slot = divmod(position, block_size)
        wanted.append((device[block - first_block], slot, host[block - first_block], slot))
    assert sorted(_slots(copies)) == sorted(wanted)


@given(cases())
def test_whole_blocks_that_follow_each_other_in_the_ring_are_one_copy(case):
    block_size, *_ = case

    copies = _cut(case)

    whole = [copy for copy in copies if copy.slots == (0, block_size)]
    for one, other in pairwise(whole):
        assert one.first_host_block + len(one.device_ids) != other.first_host_block


def _cut(case):
    block_size, first_block, device, host, span = case
    return list(
        cut_into_copies(
            GroupSpec("full", (0,), block_size, 1, 1, "uint8"),
            BlockTable.of(device, first_block=first_block),
            np.array(host, dtype=np.uint32),
            span,
        )
    )


def _slots(copies):
    return [
        (int(device), slot, copy.first_host_block + number, slot)
        for copy in copies
        for number, device in enumerate(copy.device_ids)
        for slot in range(*copy.slots)
    ]
