"""share_tensor: an engine's own tensors, moved to shared memory in place."""

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvbus.engine import SharedStorage, share_tensor, share_tensors
from kvbus.errors import ClosedError, GeometryError, SegmentError
from kvbus.memory.mapping import SegmentMapping


def shared_storage(tensor: torch.Tensor) -> SharedStorage:
    shared = share_tensor(tensor)
    assert isinstance(shared, SharedStorage)
    return shared


def mapped(shared: SharedStorage) -> SegmentMapping:
    return SegmentMapping(os.dup(shared.fd), size_bytes=shared.size_bytes)


def test_views_follow_moved_storage_and_agent_sees_their_writes() -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    part, address = tensor[100:200].view(10, 10).t(), tensor.data_ptr()
    with shared_storage(tensor) as shared, mapped(shared) as mapping:
        there = mapping.view().view(np.float32)
        part.fill_(-1.0)
        there[0] = 7.0
        assert tensor.data_ptr() == shared.address != address
        assert (shared.size_bytes, shared.offset_bytes_of(part)) == (4000, 400)
        assert not mapping.sealed  # torch's shared memory cannot be
        assert (there[100:200] == -1).all()
        assert tensor[0] == 7.0
        assert torch.equal(tensor[200:], torch.arange(200.0, 1000.0))


def test_tensors_of_one_storage_share_segment_and_move_once() -> None:
    both, other = torch.zeros(2, 64), torch.zeros(8)
    shared = share_tensors([both[0], both[1], other])
    with shared_storage(both[1]) as again:
        assert [one.size_bytes for one in shared] == [512, 32]
        assert shared[0].offset_bytes_of(both[1]) == 256
        with pytest.raises(GeometryError):
            shared[0].offset_bytes_of(other)
        assert isinstance(shared[0], SharedStorage)
        assert again.address == shared[0].address == both.data_ptr()
        assert os.path.sameopenfile(again.fd, shared[0].fd)
        assert again.fd != shared[0].fd
    for one in shared:
        one.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_memory_outlives_descriptor_which_outlives_tensor() -> None:
    tensor = torch.ones(64)
    shared = shared_storage(tensor)
    del tensor
    with mapped(shared) as mapping:
        assert mapping.view().view(np.float32).sum() == 64
    shared.close()
    shared.close()
    with pytest.raises(ClosedError):
        _ = shared.fd


SEEN_BY_NUMPY = torch.zeros(8)
SEEN_BY_NUMPY.numpy()


def in_a_named_file() -> torch.Tensor:
    with tempfile.NamedTemporaryFile() as file:
        return torch.from_file(file.name, shared=True, size=64)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "in a named file": (in_a_named_file, "file_descriptor"),
    "meta": (lambda: torch.zeros(8, device="meta"), "only dense tensors of a CPU"),
    "empty": (lambda: torch.zeros(0), "empty"),
    "of numpy": (lambda: torch.from_numpy(np.zeros(8)), "does not own"),
    "seen by numpy": (lambda: SEEN_BY_NUMPY, "does not own"),
    "of a buffer": (lambda: torch.frombuffer(bytearray(64), dtype=torch.uint8), "does not own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shared_torch_memory_is_refused_unmoved(case: str, num_open_fds: Callable[[], int]) -> None:
    make, why = REFUSED[case]
    tensor = make()
    before, address = num_open_fds(), tensor.data_ptr()
    with pytest.raises(SegmentError, match=why):
        share_tensors([torch.zeros(8), tensor])
    assert num_open_fds() == before
    assert tensor.data_ptr() == address


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_tensor_larger_than_shm_is_not_moved(child_command: Callable[..., list[str]]) -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    cramped = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    command = [*cramped, *child_command("cramped_engine")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "permitted" in result.stderr or "denied" in result.stderr:
        pytest.skip("this container may not mount")
    assert "--shm-size" in result.stdout, result.stderr
    assert result.stdout.split()[-1] == "True"


@pytest.mark.usefixtures("nothing_leaks")
def test_forgotten_shared_storage_is_warned_about_and_closed() -> None:
    shared = share_tensor(torch.zeros(8))
    with pytest.warns(ResourceWarning, match="never closed"):
        del shared


AT_EXIT = """
import builtins
import torch
from kvbus.engine import share_tensor
from kvbus.memory.segment import SharedSegment

tensor = torch.zeros(8)
builtins.kept = SharedSegment(4096), share_tensor(tensor)
"""


def test_what_the_process_holds_at_its_end_is_not_warned_about() -> None:
    """Modules that a finalizer needs may be gone by then."""
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", AT_EXIT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_forgotten_storage_is_closed_when_warnings_are_errors() -> None:
    shared = share_tensor(torch.zeros(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del shared
