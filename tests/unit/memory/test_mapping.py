"""SegmentMapping: the memory of descriptors that engines pass."""

import errno
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvbus.errors import ClosedError, ErrorCode, SegmentError
from kvbus.memory.libc import unmap
from kvbus.memory.mapping import PassedFile, SegmentMapping
from kvbus.memory.segment import SharedSegment

SIZE_BYTES = 1 << 24  # so large that nothing else takes the addresses once they are free


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def map_of(address: int) -> dict[str, str]:
    """The fields of the mapping at an address, with its mode; empty if there is none."""
    found: dict[str, str] = {}
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        first, is_range, end = line.split()[0].partition("-")
        if is_range:
            is_it = int(first, 16) <= address < int(end, 16)
            name, value = "mode", line.split()[1]
        if is_it:
            found[name] = value
    return found


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    with SharedSegment(SIZE_BYTES) as segment:
        yield segment


def mapped(segment: SharedSegment) -> SegmentMapping:
    return SegmentMapping(os.dup(segment.fd), size_bytes=segment.size_bytes)


def passed(segment: SharedSegment) -> PassedFile:
    return PassedFile(os.dup(segment.fd), size_bytes=segment.size_bytes)


def for_reading(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


def test_mappings_share_resident_memory_and_close_descriptor(segment: SharedSegment) -> None:
    fd = os.dup(segment.fd)
    with SegmentMapping(fd, size_bytes=SIZE_BYTES) as mapping:
        mapping.populate()
        resident = map_of(mapping.address)["Rss"]
        segment.view()[1] = 11
        mapping.view()[2] = 22
        assert mapping.view()[1] == 11
        assert segment.view()[2] == 22
        assert mapping.address != segment.address
        assert resident.split() == [f"{SIZE_BYTES >> 10}", "kB"]
        assert not is_open(fd)


def test_unsealed_file_is_sealed_against_shrinking_before_use() -> None:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    with SegmentMapping(os.dup(fd), size_bytes=SIZE_BYTES) as mapping:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert mapping.sealed
        assert os.fstat(fd).st_blocks * 512 == SIZE_BYTES, "no write finds the memory gone"
    os.close(fd)


Kind = Callable[..., object]
PASSED, ENGINES, BORROWED = PassedFile, SegmentMapping, partial(SegmentMapping, borrowed=True)
ALL: list[Kind] = [PASSED, ENGINES, BORROWED]


def of_size(size_bytes: int) -> int:
    fd = os.memfd_create("foreign")
    os.ftruncate(fd, size_bytes)
    return fd


PAGE = partial(of_size, 4096)


def unwritable() -> int:
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    return fd


def read_only() -> int:
    fd = of_size(4096)
    try:
        return for_reading(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("kinds", "make", "claimed_bytes", "why"),
    [
        *((ALL, PAGE, size, "claimed") for size in (4095, 4097, 8192)),
        *((ALL, PAGE, size, "claimed|makes no sense") for size in (0, -1, 1 << 70)),
        (ALL, lambda: os.open("/proc/self/status", os.O_RDONLY), 4096, "not a memory file"),
        (ALL, lambda: os.open("/proc", os.O_RDONLY), 4096, "not a memory file"),
        (ALL, lambda: os.eventfd(0), 4096, "not a memory file"),
        ([PASSED, ENGINES], read_only, 4096, "reading and writing|cannot be mapped"),
        ([ENGINES], unwritable, 4096, "reading and writing|cannot be mapped"),
    ],
)
def test_file_of_wrong_kind_size_or_mode_is_refused_and_closed(
    kinds: list[Kind], make: Callable[[], int], claimed_bytes: int, why: str
) -> None:
    for kind in kinds:
        fd = make()
        with pytest.raises(SegmentError, match=why):
            kind(fd, size_bytes=claimed_bytes)
        assert not is_open(fd)


@pytest.mark.parametrize("kind", ALL, ids=["passed", "an engine's", "borrowed"])
def test_oversized_sparse_file_is_refused_before_fill_or_read(kind: Kind) -> None:
    """Open for reading only, so that a mapping which tries to fill it fails."""
    whole = of_size(1 << 40)
    fd = for_reading(whole)
    with pytest.raises(SegmentError, match="does not fit"):
        kind(fd, size_bytes=1 << 40)
    assert not is_open(fd)
    os.close(whole)


@pytest.mark.parametrize("size_bytes", [8192, (1 << 25) + 8192], ids=["small", "in parts"])
def test_discard_zeros_live_view_and_spares_real_memory(size_bytes: int) -> None:
    with SharedSegment(size_bytes) as segment, mapped(segment) as mapping:
        segment.view()[:] = 1
        view, address = mapping.view(), mapping.address
        mapping.discard()
        mapping.discard()
        assert not view.any()
        view[:] = 5
        assert (mapping.discarded, mapping.address) == (True, address)
        assert (segment.view() == 1).all()
        assert map_of(address)
        with pytest.raises(ClosedError, match="engine is gone"):
            mapping.view()


def test_unmap_waits_for_live_view_and_later_use_is_refused(segment: SharedSegment) -> None:
    mapping = mapped(segment)
    segment.view()[:] = 1
    part, address = mapping.view()[10:20].reshape(2, 5), mapping.address
    mapping.close()
    mapping.close()
    for use in (SegmentMapping.view, SegmentMapping.discard, SegmentMapping.address.__get__):
        with pytest.raises(ClosedError):
            use(mapping)
    del mapping
    assert not part.any()
    assert map_of(address)
    del part

    assert not map_of(address)


def test_the_garbage_collector_never_unmaps_by_itself(segment: SharedSegment) -> None:
    mapping = mapped(segment)
    address = mapping.address
    with pytest.warns(ResourceWarning, match="never closed"):
        del mapping
    assert map_of(address)
    unmap(address, SIZE_BYTES)


def test_borrower_of_segment_sees_engine_writes_and_cannot_write(segment: SharedSegment) -> None:
    segment.view()[:] = 7
    with closing(passed(segment)) as ours:
        fd = ours.reopen()
        with pytest.raises(PermissionError):
            mmap.mmap(fd, SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.pwrite(fd, b"x", 0)
        with SegmentMapping(fd, size_bytes=SIZE_BYTES, borrowed=True) as theirs:
            segment.view()[5] = 9

            assert theirs.sealed
            assert theirs.view()[5] == 9
            assert (theirs.view()[6:] == 7).all()
            with pytest.raises(ValueError, match="read-only"):
                theirs.view()[0] = 1
            assert map_of(theirs.address)["mode"] == "r--s"


def test_closed_segment_is_not_lent(
    segment: SharedSegment, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    ours = passed(segment)
    assert num_open_fds() == before + 1
    ours.close()
    ours.close()
    with pytest.raises(ClosedError):
        ours.reopen()
    assert num_open_fds() == before


def test_quarter_of_open_file_limit_is_left_for_sockets(segment: SharedSegment) -> None:
    fds = [os.dup(segment.fd) for _ in range(20)]
    kept: list[ErrorCode | None] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        os.close(next_fd := os.dup(segment.fd))
        for most in (next_fd + next_fd // 4, 2 * next_fd + 100):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
            kept.append(None)
            try:
                passed(segment).close()
            except SegmentError as refused:
                kept[-1] = refused.code
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in fds:
            os.close(fd)

    assert kept == [ErrorCode.BUSY, None]


def test_truncated_file_is_seen_as_cut_without_being_touched() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(SIZE_BYTES)
        with closing(PassedFile(os.dup(file.fileno()), size_bytes=SIZE_BYTES)) as ours:
            before = ours.was_cut()
            file.truncate(SIZE_BYTES - 1)
            assert (ours.sealed, before, ours.was_cut()) == (False, False, True)


CUT = {  # arguments; what the process prints, and how it ends
    "mapped": ("cut_memory mapped", "False True 0\n", 0),
    "that of others": ("cut_memory unwatched", "False True 0\n", -signal.SIGBUS),
    "copied by the kernel": ("cut_memory copied LIBRARY", "False True 0\n", 0),
    "copied by numpy": ("cut_memory copied none", "False True 0\n", 0),
    "lent": ("cut_memory lent", "False True 0\n", 0),
    "one mapping too many": ("many_mappings", "busy True\n", 0),
}
"""Cut memory reads as zeros, its reader is told before, and any other bus error is fatal."""


@pytest.mark.parametrize(("command", "prints", "status"), CUT.values(), ids=CUT)
def test_process_survives_cut_memory_and_reads_zeros(
    child_command: Callable[..., list[str]],
    request: pytest.FixtureRequest,
    command: str,
    prints: str,
    status: int,
) -> None:
    name, *arguments = command.split()
    if "LIBRARY" in arguments:
        arguments[-1] = str(request.getfixturevalue("library"))
    full = child_command(name, *arguments)
    ended = subprocess.run(full, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == (prints, status), ended.stderr
