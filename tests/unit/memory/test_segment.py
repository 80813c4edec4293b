"""SharedSegment: what an engine may rely on."""

import fcntl
import logging
import os
import resource
from pathlib import Path
from typing import Literal

import pytest

from kvbus.engine import RankMemory
from kvbus.errors import ClosedError, SegmentError
from kvbus.memory.segment import HugePages, SharedSegment, huge_bytes, shmem_policy
from tests.support.memories import NHD
from tests.unit.engine.recording import SPEC

SIZE_BYTES = (8 << 20) + 5000
"""Some huge pages and a part of one."""
GIVING_WORDS = ("always", "within_size", "advise", "force")
"""Settings of the kernel with which advised memory gets huge pages."""


def test_segment_is_zeroed_reserved_and_not_inherited() -> None:
    with SharedSegment(100_001) as segment:
        reserved_bytes = os.fstat(segment.fd).st_blocks * 512
        content = segment.tensor.clone()
        segment.tensor[17] = 3
        assert content.shape == (segment.size_bytes,) == (100_001,)
        assert not content.any()
        assert reserved_bytes >= 100_001
        assert not os.get_inheritable(segment.fd)
        assert segment.view()[17] == 3
        assert segment.tensor.data_ptr() == segment.address


def test_a_segment_can_be_neither_cut_nor_grown_nor_unsealed() -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    with SharedSegment(8192) as segment:
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == seals
        for size_bytes in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size_bytes)


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize(
    ("size_bytes", "why"),
    [
        (1 << 50, "does not fit.*make it smaller"),
        (1 << 70, "does not fit.*make it smaller"),
        (1 << 21, "ulimit -f"),
        (0, "makes no sense"),
        (-4096, "makes no sense"),
    ],
)
def test_size_beyond_machine_or_limit_is_refused_with_advice(size_bytes: int, why: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(SegmentError, match=why):
            SharedSegment(size_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("nothing_leaks")
def test_a_segment_that_fails_after_it_was_mapped_is_unmapped() -> None:
    """It looks for huge pages in a file that cannot be opened any more."""
    with Path(os.devnull).open("rb") as lowest:  # the kernel gives the lowest number that is free
        next_fd = lowest.fileno()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + 1, hard))
    try:
        with pytest.raises(SegmentError, match="ulimit -n"):
            SharedSegment(4096, name="kvbus-not-left", huge_pages="advise")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "kvbus-not-left" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("wanted", [True, "advise"])
def test_huge_pages_are_used_where_there_are_any(wanted: Literal[True, "advise"]) -> None:
    has_free = "HugePages_Free:        0\n" not in Path("/proc/meminfo").read_text()
    gives = has_free if wanted is True else shmem_policy() in GIVING_WORDS
    with SharedSegment(SIZE_BYTES, huge_pages=wanted) as segment:
        assert segment.uses_huge_pages == gives
        assert (huge_bytes(segment.address) > 0) == gives or wanted is True
        assert segment.size_bytes == SIZE_BYTES or gives
        assert os.fstat(segment.fd).st_blocks * 512 >= SIZE_BYTES or wanted is True
        assert not segment.view().any()


@pytest.mark.usefixtures("nothing_leaks")
def test_closed_segment_is_refused_and_its_tensor_reads_zeros() -> None:
    segment = SharedSegment(4096)
    tensor = segment.tensor.fill_(1)
    segment.close()
    segment.close()
    assert int(tensor.sum()) == 0
    for use in ("fd", "address", "tensor"):
        with pytest.raises(ClosedError):
            getattr(segment, use)


@pytest.mark.parametrize("asked", [False, "advise"])
def test_lack_of_huge_pages_is_logged(asked: HugePages, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvbus.engine"):
        memory = RankMemory.allocate(SPEC, 0, NHD, num_blocks=4, huge_pages=asked)
        memory.close()
    lines = [record.getMessage() for record in caplog.records]
    must_tell = asked == "advise" and shmem_policy() not in GIVING_WORDS
    assert len(lines) == must_tell
    assert all("shmem_enabled" in line and SPEC.engine_id in line for line in lines)
