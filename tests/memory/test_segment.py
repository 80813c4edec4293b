"""SharedSegment: what an engine may rely on."""

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvbus
from kvbus.errors import ClosedError, SegmentError
from kvbus.memory import GIVING_WORDS, SharedSegment, huge_bytes, shmem_word, unmap

SIZE_OF_HUGE_PAGES = (8 << 20) + 5000

ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def test_a_segment_is_zeros_of_the_asked_size() -> None:
    with SharedSegment(100_001) as segment:
        assert segment.size_bytes == 100_001
        assert segment.tensor.shape == (100_001,)
        assert not segment.tensor.any()
        assert segment.tensor.data_ptr() == segment.address


def test_a_segment_can_be_neither_cut_nor_grown_nor_unsealed() -> None:
    with SharedSegment(8192) as segment:
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == ALL_SEALS
        for size_bytes in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size_bytes)


def test_every_page_is_reserved_before_anything_is_written() -> None:
    with SharedSegment(1 << 20) as segment:
        reserved_bytes = os.fstat(segment.fd).st_blocks * 512

        assert reserved_bytes == 1 << 20


def test_the_descriptor_is_not_inherited_by_programs_that_are_started() -> None:
    with SharedSegment(4096) as segment:
        assert not os.get_inheritable(segment.fd)


def test_tensor_and_numpy_view_are_the_same_memory() -> None:
    with SharedSegment(4096) as segment:
        segment.tensor[17] = 3

        assert segment.view()[17] == 3
        assert segment.tensor is segment.tensor


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Keeps a segment that should have been refused from taking all of the machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size_bytes", [1 << 50, 1 << 70])
def test_more_than_the_machine_has_is_refused_without_taking_any(
    size_bytes: int, num_open_fds: Callable[[], int], small_files_only: None
) -> None:
    before = num_open_fds()
    with pytest.raises(SegmentError, match=r"does not fit.*make it smaller") as caught:
        SharedSegment(size_bytes)

    assert caught.value.detail["size_bytes"] == size_bytes
    assert num_open_fds() == before


@pytest.mark.parametrize("size_bytes", [0, -4096])
def test_a_size_that_is_not_positive_is_refused(size_bytes: int) -> None:
    with pytest.raises(SegmentError, match="makes no sense"):
        SharedSegment(size_bytes)


@pytest.mark.parametrize(
    ("limit", "value", "advice"),
    [("RLIMIT_FSIZE", 4096, "ulimit -f"), ("RLIMIT_NOFILE", 0, "ulimit -n")],
)
def test_a_limit_of_the_process_is_named_with_what_to_do(
    limit: str, value: int, advice: str
) -> None:
    script = f"""
import os, resource
from kvbus.errors import SegmentError
from kvbus.memory import SharedSegment
from kvbus.memory import segment
fds = os.listdir("/proc/self/fd")
hard = resource.getrlimit(resource.{limit})[1]
segment.check_memory = lambda size_bytes: None  # reads files, which the limit forbids too
resource.setrlimit(resource.{limit}, ({value}, hard))
try:
    SharedSegment(1 << 20)
except SegmentError as error:
    resource.setrlimit(resource.{limit}, (hard, hard))
    print(error, len(os.listdir("/proc/self/fd")) - len(fds))
"""
    assert hasattr(resource, limit)
    environment = {"PYTHONPATH": str(Path(kvbus.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )

    assert advice in result.stdout
    assert result.stdout.split()[-1] == "0"


def test_huge_pages_are_used_where_there_are_enough_and_ordinary_ones_else() -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    num_free = int(meminfo["HugePages_Free"])
    with SharedSegment(5000, huge_pages=True) as segment:
        segment.tensor[4999] = 1

        assert segment.uses_huge_pages == (num_free > 0)
        assert segment.size_bytes == 5000 or segment.uses_huge_pages


def test_advised_huge_pages_are_given_where_the_machine_gives_them_and_ordinary_ones_else() -> None:
    with SharedSegment(SIZE_OF_HUGE_PAGES, huge_pages="advise") as segment:
        in_huge_pages = huge_bytes(segment.address)

        assert segment.uses_huge_pages == (shmem_word() in GIVING_WORDS)
        assert segment.uses_huge_pages == (in_huge_pages > 0)
        assert segment.size_bytes == SIZE_OF_HUGE_PAGES
        assert os.fstat(segment.fd).st_blocks * 512 >= SIZE_OF_HUGE_PAGES, "all pages are taken"
        assert not segment.view().any()


def test_closing_twice_is_harmless_and_use_after_it_is_refused(
    num_open_fds: Callable[[], int],
) -> None:
    before = num_open_fds()
    segment = SharedSegment(4096)
    segment.close()
    segment.close()

    assert num_open_fds() == before
    for use in ("fd", "address", "tensor"):
        with pytest.raises(ClosedError):
            getattr(segment, use)


def test_a_tensor_that_outlives_its_segment_reads_zeros() -> None:
    segment = SharedSegment(4096)
    tensor = segment.tensor
    tensor.fill_(1)
    segment.close()

    assert int(tensor.sum()) == 0


def test_a_forgotten_segment_is_warned_about() -> None:
    segment = SharedSegment(4096)
    fd, address = segment.fd, segment.address
    with pytest.warns(ResourceWarning, match="never closed"):
        del segment

    os.close(fd)
    unmap(address, 4096)
