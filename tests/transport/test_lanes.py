"""Whose slice of one peer is next: short and long reads alternately, urgent ones first."""

from itertools import islice

import numpy as np

from kvbus.table import FAIR_TURN
from kvbus.transport import Lane, ReadJob, Slices


def job(priority: int = 0) -> ReadJob:
    rows = np.array([[1, 8, 0]], np.uint64)
    slices = Slices(rows, rows, slice_bytes=8, slice_rows=1)
    return ReadJob(peer="p", slices=slices, kinds=("DRAM", "DRAM"), on_end=print, priority=priority)


def turns(lane: Lane, *long: ReadJob, num: int) -> list[ReadJob]:
    """Whose turn it is, where each of these waits again, after a slice."""

    def taken() -> ReadJob:
        one = lane.waiting.take()
        assert one is not None
        lane.waiting.add(one, short=one not in long)
        return one

    return [taken() for _ in range(num)]


def test_an_urgent_read_has_all_turns_but_the_fair_ones_whichever_is_short() -> None:
    for urgent_is_short in (False, True):
        lane, slow, urgent = Lane(), job(), job(1)
        lane.waiting.add(slow, short=not urgent_is_short)
        lane.waiting.add(urgent, short=urgent_is_short)
        long = slow if urgent_is_short else urgent

        taken = turns(lane, long, num=8 * FAIR_TURN)

        assert 4 <= taken.count(slow) <= 8
        assert taken[0] is urgent


def test_reads_that_are_as_urgent_have_turns_as_before() -> None:
    lane, short, first, second = Lane(), job(), job(), job()
    lane.waiting.add(first, short=False)
    lane.waiting.add(second, short=False)
    lane.waiting.add(short, short=True)

    taken = turns(lane, first, second, num=20)

    assert taken == list(islice([short, first, short, second] * 5, 20))


def test_a_short_read_that_is_not_urgent_is_not_starved_by_long_ones_that_are() -> None:
    lane, short, urgent = Lane(), job(), job(1)
    lane.waiting.add(short, short=True)

    for _ in range(2 * FAIR_TURN):
        lane.waiting.add(job(1), short=False)
        lane.waiting.add(urgent, short=False)
        if lane.waiting.take() is short:
            return

    raise AssertionError("it was not served")
