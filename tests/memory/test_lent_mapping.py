"""A segment that is lent: for reading only, checked, and survived when it is cut."""

import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbus.memory import LentMapping, SegmentMapping, SharedSegment

SIZE_BYTES = 1 << 16


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    with SharedSegment(SIZE_BYTES) as made:
        made.view()[:] = 7
        yield made


def lent(segment: SharedSegment) -> SegmentMapping:
    """What an agent has of the segment of its engine."""
    return SegmentMapping(os.dup(segment.fd), size_bytes=SIZE_BYTES, lend=True)


def copy_of(fd: int | None) -> int:
    assert fd is not None
    return os.dup(fd)


def test_who_is_lent_a_segment_sees_what_the_engine_writes_and_can_write_nothing(
    segment: SharedSegment,
) -> None:
    with lent(segment) as ours:
        fd = copy_of(ours.lent_fd)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.pwrite(fd, b"x", 0)
        with LentMapping(fd, size_bytes=SIZE_BYTES) as theirs:
            segment.view()[5] = 9

            assert theirs.sealed
            assert theirs.view()[5] == 9
            assert (theirs.view()[6:] == 7).all()
            with pytest.raises(ValueError, match="read-only"):
                theirs.view()[0] = 1
            maps = Path("/proc/self/maps").read_text().splitlines()
            (line,) = [one for one in maps if one.startswith(f"{theirs.address:x}-")]
            assert line.split()[1] == "r--s"


@pytest.mark.parametrize("end", [SegmentMapping.discard, SegmentMapping.close])
def test_a_segment_is_lent_no_longer_than_it_is_the_engines(
    segment: SharedSegment, end: Callable[[SegmentMapping], None]
) -> None:
    ours = lent(segment)
    fd = ours.lent_fd
    assert fd is not None

    end(ours)

    assert ours.lent_fd is None
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        fcntl.fcntl(fd, fcntl.F_GETFD)
    ours.close()


def test_a_segment_of_which_nothing_is_lent_keeps_no_descriptor(
    segment: SharedSegment, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    with SegmentMapping(os.dup(segment.fd), size_bytes=SIZE_BYTES) as ours:
        assert ours.lent_fd is None
        assert num_open_fds() == before


@contextmanager
def at_most_files(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_half_of_the_files_that_a_process_may_open_are_left_for_its_sockets(
    segment: SharedSegment, num_open_fds: Callable[[], int]
) -> None:
    fds = [os.dup(segment.fd) for _ in range(20)]
    with at_most_files(2 * max(fds)), lent(segment) as ours:
        open_files = num_open_fds()
        assert ours.lent_fd is None
    with at_most_files(2 * max(fds) + 100), lent(segment) as ours:
        assert ours.lent_fd is not None
        assert num_open_fds() == open_files + 1
    for fd in fds:
        os.close(fd)
