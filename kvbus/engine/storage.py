"""Shared memory for tensors."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from kvbus.errors import ClosedError, GeometryError, SegmentError
from kvbus.memory.cuda import GpuMemory
from kvbus.memory.mapping import OwnedMemory
from kvbus.memory.memory_limits import check_memory

_SHARED_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - where shm_open, and so torch, puts files


class TorchStorage(OwnedMemory):
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage: torch.UntypedStorage | None = storage
        self.address, self.size_bytes = storage.data_ptr(), storage.nbytes()
        self.closed = False

    def offset_bytes_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != self.address or storage.nbytes() != self.size_bytes:
            raise GeometryError("the tensor does not lie in this shared storage")
        return tensor.data_ptr() - self.address

    def close(self) -> None:
        self._storage, self.closed = None, True

    def _check_open(self) -> torch.UntypedStorage:
        if self._storage is None:
            raise ClosedError("the shared storage was closed")
        return self._storage


class CudaStorage(TorchStorage):
    """A torch storage on a GPU that an agent can open. Raises `SegmentError`.

    Close it after the agent has: until then torch must not free the memory.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() == 0:
            raise SegmentError("an empty tensor has no memory to share")
        super().__init__(storage)
        self.memory = GpuMemory(ordinal_of(storage.device), self.address, self.size_bytes)

    def __del__(self) -> None:
        """Do not warn: torch frees the memory."""


def ordinal_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class SharedStorage(TorchStorage):
    """A torch storage in shared memory; its file cannot be sealed.

    The memory lives as long as a tensor, this object or a mapping.
    """

    def __init__(self, storage: torch.UntypedStorage, fd: int) -> None:
        super().__init__(storage)
        self._fd = fd

    @property
    def fd(self) -> int:
        self._check_open()
        return self._fd

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()

    def __del__(self) -> None:
        try:
            super().__del__()
        finally:  # also where warnings are errors
            self.close()


def share_tensor(tensor: torch.Tensor) -> SharedStorage | CudaStorage:
    """Move the tensor's storage to shared memory, once; all views follow. A GPU tensor stays.

    Only ``data_ptr()`` changes. Share before a raw address is kept (DLPack, a compiled graph, a
    pinned registration), and while no thread writes. The move briefly needs the memory twice.
    Raises `SegmentError`.
    """
    if tensor.device.type == "cuda":
        return CudaStorage(tensor.untyped_storage())
    storage = _movable_storage(tensor)
    try:
        fd, _ = storage._share_fd_cpu_()  # torch keeps this descriptor for itself
        return SharedStorage(storage, os.dup(fd))
    except (RuntimeError, OSError) as error:
        raise SegmentError(
            f"cannot move a tensor's {storage.nbytes()} bytes to shared memory: {error}",
            size_bytes=storage.nbytes(),
        ) from error


def share_tensors(tensors: Iterable[torch.Tensor]) -> list[SharedStorage | CudaStorage]:
    """Share all distinct storages, in order of appearance; on `SegmentError`, close all."""
    shared: dict[int, SharedStorage | CudaStorage] = {}
    try:
        for tensor in tensors:
            if _storage_of(tensor).data_ptr() not in shared:
                one = share_tensor(tensor)
                shared[one.address] = one
    except BaseException:
        for one in shared.values():
            one.close()
        raise
    return list(shared.values())


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
        raise SegmentError(
            f"only dense tensors of a CPU or a CUDA GPU can be shared, not {tensor.layout} on "
            f"{tensor.device}"
        )
    return tensor.untyped_storage()


def _movable_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    storage = _storage_of(tensor)
    if storage.nbytes() == 0:
        raise SegmentError("an empty tensor has no memory to share")
    if storage.is_shared():
        _check_sharing_strategy(storage)
        return storage
    if not storage.resizable():
        raise SegmentError(
            "torch does not own the tensor's memory alone (numpy, from_blob, a SharedSegment): "
            "share the owner's memory, or a clone() of the tensor"
        )
    if tensor.is_pinned():
        raise SegmentError("pinned memory cannot be shared: a move would unpin it; share a clone()")
    _check_room(storage.nbytes())
    return storage


def _check_sharing_strategy(storage: torch.UntypedStorage) -> None:
    """Accept only torch's unlinked file: a move would detach other users of the memory."""
    name = _mapped_file_name(storage.data_ptr())
    if not (name.startswith(f"{_SHARED_MEMORY_FOLDER}/") and name.endswith(" (deleted)")):
        raise SegmentError(
            f"the tensor is already shared through the file {name!r}: use torch's sharing strategy "
            "'file_descriptor', or share a clone() of the tensor"
        )


def _mapped_file_name(address: int) -> str:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        first, end = (int(text, 16) for text in addresses.split("-"))
        if first <= address < end:
            return name
    return ""


def _check_room(size_bytes: int) -> None:
    check_memory(size_bytes)
    room = os.statvfs(_SHARED_MEMORY_FOLDER)
    available_bytes = room.f_bavail * room.f_frsize
    if size_bytes > available_bytes:
        raise SegmentError(
            f"{os.strerror(errno.ENOSPC)}: {_SHARED_MEMORY_FOLDER} has {available_bytes} bytes for "
            f"a tensor of {size_bytes}; enlarge it (docker: --shm-size) or use a SharedSegment",
            size_bytes=size_bytes,
            available_bytes=available_bytes,
        )
