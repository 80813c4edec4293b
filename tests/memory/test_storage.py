"""share_tensor: an engine's own tensors, moved to shared memory in place."""

import os
import subprocess
import tempfile
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvbus.errors import ClosedError, GeometryError, SegmentError
from kvbus.memory import SegmentMapping, SharedStorage, share_tensor, share_tensors


def shared_storage(tensor: torch.Tensor) -> SharedStorage:
    shared = share_tensor(tensor)
    assert isinstance(shared, SharedStorage)
    return shared


def test_values_and_every_view_follow_and_only_the_address_changes() -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    part = tensor[100:200].view(10, 10).t()
    address = tensor.data_ptr()
    with shared_storage(tensor) as shared:
        tensor[100] = -1

        assert tensor.data_ptr() == shared.address != address
        assert shared.size_bytes == 4000
        assert torch.equal(tensor[200:], torch.arange(200.0, 1000.0))
        assert part[0, 0] == -1
        assert shared.offset_bytes_of(part) == 400


def test_the_agent_sees_writes_through_every_view_and_the_engine_the_agents() -> None:
    tensor = torch.zeros(4096, dtype=torch.bfloat16)
    row = tensor.view(64, 64)[3]
    with (
        shared_storage(tensor) as shared,
        SegmentMapping(os.dup(shared.fd), size_bytes=shared.size_bytes) as mapping,
    ):
        row.fill_(1.0)
        there = mapping.view().view(np.uint16)
        there[0] = there[64 * 3]

        assert not mapping.sealed  # torch's shared memory cannot be
        assert np.count_nonzero(there) == 65
        assert tensor[0] == 1.0


def test_parameters_stay_the_same_objects_and_can_still_be_trained() -> None:
    layer = torch.nn.Linear(8, 8)
    weight, before = layer.weight, layer.weight.detach().clone()
    with shared_storage(layer.weight):
        layer(torch.ones(8)).sum().backward()

        assert layer.weight is weight
        assert torch.equal(layer.weight, before)
        assert weight.grad is not None


def test_tensors_of_one_storage_share_one_segment() -> None:
    both = torch.zeros(2, 64)
    other = torch.zeros(8)
    shared = share_tensors([both[0], both[1], other])

    assert [one.size_bytes for one in shared] == [512, 32]
    assert shared[0].offset_bytes_of(both[1]) == 256
    with pytest.raises(GeometryError):
        shared[0].offset_bytes_of(other)
    for one in shared:
        one.close()


def test_sharing_twice_moves_nothing_twice() -> None:
    tensor = torch.arange(64)
    with shared_storage(tensor) as first, shared_storage(tensor[8:]) as second:
        assert first.address == second.address == tensor.data_ptr()
        assert os.path.sameopenfile(first.fd, second.fd)
        assert first.fd != second.fd


def test_the_memory_outlives_the_descriptor_and_the_descriptor_the_tensor(
    num_open_fds: Callable[[], int],
) -> None:
    before = num_open_fds()
    tensor = torch.ones(64)
    shared = shared_storage(tensor)
    del tensor
    with SegmentMapping(os.dup(shared.fd), size_bytes=256) as mapping:
        assert mapping.view().view(np.float32).sum() == 64
    shared.close()
    shared.close()
    with pytest.raises(ClosedError):
        _ = shared.fd
    del shared

    assert num_open_fds() == before


def refused_tensors() -> dict[str, tuple[Callable[[], torch.Tensor], str]]:
    def seen_by_numpy() -> torch.Tensor:
        tensor = torch.zeros(8)
        tensor.numpy()
        return tensor

    def by_file_system() -> torch.Tensor:
        storage = torch.UntypedStorage._new_using_filename_cpu(4096)
        return torch.zeros(0, dtype=torch.uint8).set_(storage)

    def in_a_named_file() -> torch.Tensor:
        with tempfile.NamedTemporaryFile() as file:
            return torch.from_file(file.name, shared=True, size=64)

    return {
        "by file system": (by_file_system, "file_descriptor"),
        "in a named file": (in_a_named_file, "file_descriptor"),
        "meta": (lambda: torch.zeros(8, device="meta"), "only dense tensors of a CPU"),
        "sparse": (lambda: torch.eye(4).to_sparse(), "only dense tensors of a CPU"),
        "empty": (lambda: torch.zeros(0), "empty"),
        "of numpy": (lambda: torch.from_numpy(np.zeros(8)), "does not own"),
        "seen by numpy": (seen_by_numpy, "does not own"),
        "of a buffer": (lambda: torch.frombuffer(bytearray(64), dtype=torch.uint8), "does not own"),
    }


def address_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_sparse else tensor.data_ptr()


@pytest.mark.parametrize("case", refused_tensors())
def test_memory_that_torch_does_not_own_alone_is_refused_and_not_moved(
    case: str, num_open_fds: Callable[[], int]
) -> None:
    make, why = refused_tensors()[case]
    tensor = make()
    before, address = num_open_fds(), address_of(tensor)
    with pytest.raises(SegmentError, match=why):
        share_tensor(tensor)

    assert num_open_fds() == before
    assert address_of(tensor) == address


def test_when_one_of_several_is_refused_no_descriptor_stays_open(
    num_open_fds: Callable[[], int],
) -> None:
    before = num_open_fds()
    with pytest.raises(SegmentError, match="does not own"):
        share_tensors([torch.zeros(8), torch.from_numpy(np.zeros(8))])

    assert num_open_fds() == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_a_tensor_larger_than_the_shared_memory_file_system_is_refused_before_it_is_moved(
    child_command: Callable[..., list[str]],
) -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    cramped = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    result = subprocess.run(
        [*cramped, *child_command("cramped_engine")], capture_output=True, text=True, check=False
    )
    if "permitted" in result.stderr or "denied" in result.stderr:
        pytest.skip("this container may not mount")

    assert "--shm-size" in result.stdout, result.stderr
    assert result.stdout.split()[-1] == "True"


def test_forgotten_shared_storage_is_warned_about_and_closed(
    num_open_fds: Callable[[], int],
) -> None:
    before = num_open_fds()
    shared = share_tensor(torch.zeros(8))
    with pytest.warns(ResourceWarning, match="never closed"):
        del shared

    assert num_open_fds() == before
