"""Copies wait for the engine's work in their thread: until it is done, or the engine dies."""

from itertools import chain, repeat

import pytest

from kvbus.errors import ErrorCode, LocalError
from kvbus.memory.cuda import wait_for

NEVER = 10**9


class Recorded:
    """An event that comes when it has been asked so often."""

    def __init__(self, after: int) -> None:
        self.left = after

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_every_event_is_waited_for_and_what_has_come_does_not_need_the_engine() -> None:
    events = [Recorded(3), Recorded(0), Recorded(5)]

    wait_for(events, gone=lambda: False)
    wait_for([Recorded(0)], gone=lambda: True)

    assert [event.left for event in events] == [-1, -1, -1]


def test_work_is_given_up_when_the_engine_is_gone_or_it_takes_too_long() -> None:
    gone = chain(repeat(False, 3), repeat(True))

    with pytest.raises(LocalError) as lost:
        wait_for([Recorded(2), Recorded(NEVER)], gone=lambda: next(gone))
    with pytest.raises(LocalError) as late:
        wait_for([Recorded(NEVER)], gone=lambda: False, timeout_s=0.01)

    assert (lost.value.code, late.value.code) == (ErrorCode.ENGINE_LOST, ErrorCode.TIMEOUT)
