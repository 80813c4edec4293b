"""Copies wait for the engine's work in their thread: until it is done, or the engine dies."""

import pytest

from kvbus.errors import ErrorCode, LocalError
from kvbus.memory import wait_for


class Recorded:
    """An event that comes when it has been asked so often."""

    def __init__(self, after: int) -> None:
        self.left = after

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_every_event_is_waited_for() -> None:
    events = [Recorded(3), Recorded(0), Recorded(5)]

    wait_for(events, gone=lambda: False)

    assert [event.left for event in events] == [-1, -1, -1]


def test_an_engine_that_is_gone_is_not_waited_for() -> None:
    asked: list[None] = []

    def gone() -> bool:
        asked.append(None)
        return len(asked) == 4

    with pytest.raises(LocalError) as ended:
        wait_for([Recorded(2), Recorded(10**9)], gone=gone)

    assert ended.value.code is ErrorCode.ENGINE_LOST


def test_work_that_is_done_is_copied_though_the_engine_has_ended() -> None:
    wait_for([Recorded(0)], gone=lambda: True)


def test_work_that_never_ends_is_given_up() -> None:
    with pytest.raises(LocalError, match=r"0\.01 s") as late:
        wait_for([Recorded(10**9)], gone=lambda: False, timeout_s=0.01)

    assert late.value.code is ErrorCode.TIMEOUT
