"""How fast READs between two areas are: measured with real NIXL, and nothing of it is left."""

import mmap
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvbus.errors import ErrorCode, LocalError
from kvbus.transport import LONG_BYTES, Area, measure_wire
from tests.transport.conftest import until


def left_behind() -> tuple[int, int, int]:
    """Threads of transports, open files, and mappings of what was read."""
    threads = sum(one.name == "kvbus-transport" for one in threading.enumerate())
    places = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [[int(end, 16) for end in place.split("-")] for place in places]
    num_mapped = sum(stop - start == LONG_BYTES for start, stop in ends)
    return threads, len(list(Path("/proc/self/fd").iterdir())), num_mapped


def is_as(before: tuple[int, int, int]) -> bool:
    return all(now <= then for now, then in zip(left_behind(), before, strict=True))


def area() -> Area:
    """Ones: untouched zeros would all be one page, which the cache holds."""
    ones = np.frombuffer(mmap.mmap(-1, LONG_BYTES), np.uint8)
    ones[:] = 1
    return Area(ones.ctypes.data, ones.size, 0, "DRAM", ones)


def test_bytes_have_a_speed_and_nothing_is_left_in_time_or_not(over_tcp: None) -> None:
    """Some are over while they make their agents, others within a read."""
    with pytest.raises(LocalError, match="not measured in time") as refused:
        measure_wire("agent/boot", area(), area(), timeout_s=0)
    measure_wire("agent/boot", area(), area(), timeout_s=30)  # UCX keeps some of its own from then
    before = left_behind()

    bytes_per_s = measure_wire("agent/boot", area(), area(), timeout_s=30)
    for timeout_s in (0.02, 0.05, 0.1):
        with suppress(LocalError):
            measure_wire("agent/boot", area(), area(), timeout_s=timeout_s)

    assert 1e6 < bytes_per_s < 1e13
    assert refused.value.code is ErrorCode.TIMEOUT
    until(lambda: is_as(before))
