"""SegmentMapping: what the agent makes of a descriptor that it was passed."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvbus
from kvbus.errors import ClosedError, SegmentError
from kvbus.memory import LentMapping, Pages, SegmentMapping, SharedSegment, unmap

SIZE_BYTES = 1 << 24  # so large that nothing else takes the addresses once they are free


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(text, 16) for text in line.split()[0].split("-"))
        if first <= address < end:
            return True
    return False


def resident_bytes(address: int) -> int:
    """Bytes of the mapping at ``address`` that this process accesses without a page fault."""
    wanted = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            wanted = line.startswith(f"{address:x}-")
        elif wanted and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise KeyError(address)


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    with SharedSegment(SIZE_BYTES) as segment:
        yield segment


@pytest.fixture
def mapping(segment: SharedSegment) -> Iterator[SegmentMapping]:
    with SegmentMapping(os.dup(segment.fd), size_bytes=SIZE_BYTES) as mapping:
        yield mapping


def test_both_mappings_are_the_same_memory(segment: SharedSegment, mapping: SegmentMapping) -> None:
    segment.view()[1] = 11
    mapping.view()[2] = 22

    assert mapping.view()[1] == 11
    assert segment.view()[2] == 22
    assert mapping.address != segment.address


def test_all_pages_are_there_before_the_first_access(mapping: SegmentMapping) -> None:
    assert resident_bytes(mapping.address) == SIZE_BYTES


def test_pages_for_which_there_was_no_time_are_left_to_the_first_access(
    segment: SharedSegment,
) -> None:
    pages = Pages(segment.fd, SIZE_BYTES)

    pages.populate(within_s=0.0)

    assert resident_bytes(pages.address) == 0
    pages.release()


def test_the_descriptor_is_closed_once_it_is_mapped(segment: SharedSegment) -> None:
    fd = os.dup(segment.fd)
    with SegmentMapping(fd, size_bytes=SIZE_BYTES):
        assert not is_open(fd)


def test_a_descriptor_for_reading_only_is_refused_and_closed(segment: SharedSegment) -> None:
    fd = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDONLY)
    with pytest.raises(SegmentError, match="reading and writing"):
        SegmentMapping(fd, size_bytes=SIZE_BYTES)

    assert not is_open(fd)


def test_an_unsealed_file_is_sealed_against_shrinking_before_it_is_believed() -> None:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    with SegmentMapping(os.dup(fd), size_bytes=SIZE_BYTES) as mapping:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)

        assert mapping.sealed
    os.close(fd)


def test_a_file_that_forbids_seals_is_accepted_and_said_to_be_unsealed() -> None:
    fd = os.memfd_create("unsealable")
    os.ftruncate(fd, SIZE_BYTES)
    with SegmentMapping(fd, size_bytes=SIZE_BYTES) as mapping:
        assert not mapping.sealed
        assert not mapping.view().any()


def test_holes_are_filled_before_use_so_that_no_write_finds_the_memory_gone() -> None:
    fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    with SegmentMapping(os.dup(fd), size_bytes=SIZE_BYTES):
        assert os.fstat(fd).st_blocks * 512 == SIZE_BYTES
    os.close(fd)


Kind = type[SegmentMapping] | type[LentMapping]
either = pytest.mark.parametrize("kind", [SegmentMapping, LentMapping])


@either
@pytest.mark.parametrize(
    "claimed_bytes", [0, -1, SIZE_BYTES - 1, SIZE_BYTES + 1, SIZE_BYTES * 2, 1 << 70]
)
def test_a_file_of_another_size_than_claimed_is_refused_and_closed(
    segment: SharedSegment, kind: Kind, claimed_bytes: int
) -> None:
    fd = os.dup(segment.fd)
    with pytest.raises(SegmentError, match=r"claimed|makes no sense"):
        kind(fd, size_bytes=claimed_bytes)

    assert not is_open(fd)


@either
def test_what_is_no_memory_file_is_refused_and_closed(
    kind: Kind, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    on_disk = os.open("/proc/self/status", os.O_RDONLY)
    for fd in (on_disk, os.open("/tmp", os.O_RDONLY), os.eventfd(0)):  # noqa: S108 - a directory
        with pytest.raises(SegmentError, match="not a memory file"):
            kind(fd, size_bytes=4096)

    assert num_open_fds() == before


@either
def test_a_sparse_file_larger_than_the_machine_is_refused_before_it_is_filled_or_read(
    kind: Kind,
) -> None:
    """Open for reading only, so that a mapping which tries to fill it fails and takes nothing."""
    fd = os.memfd_create("vast")
    os.ftruncate(fd, 1 << 40)
    for_reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(SegmentError, match="does not fit"):
        kind(for_reading, size_bytes=1 << 40)

    assert not is_open(for_reading)


def test_a_write_sealed_file_is_refused() -> None:
    fd = os.memfd_create("read only", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    os.posix_fallocate(fd, 0, SIZE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(SegmentError):
        SegmentMapping(fd, size_bytes=SIZE_BYTES)

    assert not is_open(fd)


def test_discard_leaves_zeros_under_a_live_view_and_touches_nothing_real(
    segment: SharedSegment, mapping: SegmentMapping
) -> None:
    segment.view()[:] = 1
    view = mapping.view()
    mapping.discard()
    after_discard = int(view.sum())
    view[:] = 5

    assert after_discard == 0
    assert mapping.discarded
    assert segment.view()[0] == 1
    assert segment.view()[SIZE_BYTES - 1] == 1


def test_discard_keeps_the_address_but_gives_no_new_views(mapping: SegmentMapping) -> None:
    address = mapping.address
    mapping.discard()
    mapping.discard()

    assert mapping.address == address
    assert is_mapped(address)
    with pytest.raises(ClosedError, match="engine is gone"):
        mapping.view()


def test_a_large_mapping_is_discarded_part_by_part() -> None:
    size_bytes = (1 << 25) + 8192  # more than a part
    with SharedSegment(size_bytes) as segment:
        segment.view()[:] = 7
        with SegmentMapping(os.dup(segment.fd), size_bytes=size_bytes) as mapping:
            view = mapping.view()
            mapping.discard()

            assert not view.any()
            assert segment.view().all()


def test_unmapping_twice_is_harmless_and_use_after_it_is_refused(mapping: SegmentMapping) -> None:
    address = mapping.address
    mapping.unmap()
    mapping.unmap()

    assert not is_mapped(address)
    for use in (mapping.view, mapping.discard, lambda: mapping.address):
        with pytest.raises(ClosedError):
            use()


def test_unmapping_under_a_live_view_waits_for_the_view(
    segment: SharedSegment, mapping: SegmentMapping
) -> None:
    segment.view()[:] = 1
    part = mapping.view()[10:20].reshape(2, 5)
    address = mapping.address
    mapping.unmap()
    read_after = int(part.sum())
    mapped_while_viewed = is_mapped(address)
    del part

    assert read_after == 0
    assert mapped_while_viewed
    assert not is_mapped(address)


def test_the_garbage_collector_never_unmaps_by_itself(segment: SharedSegment) -> None:
    mapping = SegmentMapping(os.dup(segment.fd), size_bytes=SIZE_BYTES)
    address = mapping.address
    with pytest.warns(ResourceWarning, match="never closed"):
        del mapping

    assert is_mapped(address)
    unmap(address, SIZE_BYTES)


def test_an_agent_attaches_and_maps_without_importing_torch() -> None:
    script = """
import os, sys
import kvbus.memory.attach
from kvbus.memory import SegmentMapping
from kvbus.memory import SharedSegment
with SharedSegment(4096) as segment, SegmentMapping(os.dup(segment.fd), size_bytes=4096) as mapping:
    segment.view()[0] = mapping.view()[1]
print("torch" in sys.modules)
"""
    environment = {"PYTHONPATH": str(Path(kvbus.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )

    assert result.stdout.strip() == "False"
