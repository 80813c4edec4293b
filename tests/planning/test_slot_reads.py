"""READs of slots name the device of either side; those of whole slots, their addresses too."""

import numpy as np

from kvbus.planning import Descriptors, from_slot, whole_slot


def test_a_whole_slot_is_one_read_from_their_device_to_ours():
    reads = whole_slot((0x4200, 1), (0x7000, 3), 96)

    assert reads.local.tolist() == [[0x4200, 96, 1]]
    assert reads.remote.tolist() == [[0x7000, 96, 3]]


def test_reads_into_blocks_start_where_the_slot_is_and_end_in_host_memory():
    local = np.array([[64, 16, 0], [128, 16, 0]], np.uint64)
    remote = np.array([[0, 16, 0], [16, 16, 0]], np.uint64)

    reads = from_slot(Descriptors(local=local.copy(), remote=remote), 0x7000, 3)

    assert reads.local.tolist() == local.tolist()
    assert reads.remote.tolist() == [[0x7000, 16, 3], [0x7010, 16, 3]]
