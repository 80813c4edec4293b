"""Memory that must be given back: a memory file's mapping in this process, a torch storage.

NIXL and kernels know the address without Python knowing of them. So the pages go only when
``release`` asks for it, and the addresses only after the last numpy or torch view of them is gone.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from kvbus.errors import ClosedError, GeometryError
from kvbus.memory import libc

if TYPE_CHECKING:
    import torch

_POPULATED_AT_ONCE_BYTES = 1 << 28
_DISCARDED_AT_ONCE_BYTES = 1 << 25


class Pages:
    """The pages of a memory file, mapped shared and readable. Raises ``OSError``."""

    def __init__(self, fd: int, length_bytes: int, *, writable: bool = True) -> None:
        self.address = libc.map_shared(fd, length_bytes, writable=writable)
        self.length_bytes = length_bytes
        self._writable = writable

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What numpy reads to make a view that keeps this object alive."""
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.length_bytes,),
            "data": (self.address, not self._writable),
        }

    def populate(self, within_s: float) -> None:
        """Have the first access to each page cost no more than later ones, if the kernel can.

        From the first page on, for ``within_s`` seconds at most.
        """
        deadline = time.monotonic() + within_s
        with contextlib.suppress(OSError):
            for offset in range(0, self.length_bytes, _POPULATED_AT_ONCE_BYTES):
                if time.monotonic() >= deadline:
                    return
                length = min(_POPULATED_AT_ONCE_BYTES, self.length_bytes - offset)
                libc.populate(self.address + offset, length, writable=self._writable)

    # An engine dies while NIXL reads from its memory, or writes into it. NIXL cannot cancel, and
    # has only addresses. To unmap them would crash this process, or let the bytes land in whatever
    # is mapped there next. So one mmap puts other pages under the same addresses, with no moment
    # at which nothing is there:
    #
    #     before   address ──▶ pages of the file (the engine's KV)
    #     discard  address ──▶ private zeros; the file's pages are free once nobody else maps them
    #     release  as discard; the addresses go when the last view is collected
    #
    # A page of zeros costs memory only when something is written into it. The kernel takes a while
    # for each GiB, and keeps every page fault of the process waiting meanwhile: hence the parts.
    def discard(self) -> None:
        """Drop the file's pages and leave zeros at the same addresses; live views stay usable.

        It takes a tenth of a second and more for each GiB: large ones belong into a thread.
        """
        for offset in range(0, self.length_bytes, _DISCARDED_AT_ONCE_BYTES):
            length = min(_DISCARDED_AT_ONCE_BYTES, self.length_bytes - offset)
            libc.map_zeros_over(self.address + offset, length)

    def release(self) -> None:
        """Discard now; give the addresses back when the last view and the owner have let go."""
        self.discard()
        finalizer = weakref.finalize(self, libc.unmap, self.address, self.length_bytes)
        finalizer.atexit = False  # at exit, views may be alive and the kernel cleans up anyway


class OwnedMemory(ABC):
    """Memory that goes when its owner says so; the garbage collector only warns.

    NIXL, kernels and other processes use addresses that Python knows nothing of.
    """

    size_bytes: int

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it was given back."""

    @abstractmethod
    def close(self) -> None:
        """Give it back; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not (self.closed or sys.is_finalizing()):  # at exit the kernel takes all of it
            what = f"{type(self).__name__} of {self.size_bytes} bytes"
            warnings.warn(f"{what} was never closed", ResourceWarning, stacklevel=2)


class OwnedStorage(OwnedMemory):
    """A torch storage that an engine passes to its agent; alive until it is closed."""

    _storage: torch.UntypedStorage | None = None

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self.address = storage.data_ptr()
        self.size_bytes = storage.nbytes()

    @property
    def closed(self) -> bool:
        return self._storage is None

    def offset_bytes_of(self, tensor: torch.Tensor) -> int:
        """Return where the tensor's first element is; ``GeometryError`` if it lies elsewhere."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() != self.address or storage.nbytes() != self.size_bytes:
            raise GeometryError("the tensor does not lie in this shared storage")
        return tensor.data_ptr() - self.address

    def close(self) -> None:
        """Let the storage go; idempotent."""
        self._storage = None

    def _open(self) -> torch.UntypedStorage:
        if self._storage is None:
            raise ClosedError("the shared storage was closed")
        return self._storage


class MappedFile(OwnedMemory):
    """A memory file that is mapped here until ``close``; its maker sets ``_pages``."""

    _pages: Pages | None = None
    _tensor: torch.Tensor | None = None

    @property
    def closed(self) -> bool:
        return self._pages is None

    @property
    def address(self) -> int:
        """Where the first byte is in this process."""
        return self._mapped().address

    @property
    def pages(self) -> Pages:
        """What is mapped; who holds it holds the addresses, also after `close`, as zeros."""
        return self._mapped()

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes as one uint8 tensor, always the same one."""
        if self._tensor is None:
            import torch  # noqa: PLC0415 - costs seconds, and who wants numpy should not pay

            self._tensor = torch.from_numpy(self.view())
        return self._tensor

    def view(self) -> npt.NDArray[np.uint8]:
        """Return all bytes, writable where the mapping is, without torch."""
        return np.asarray(self._mapped())

    def close(self) -> None:
        """Give the memory back here; idempotent. The mapping of another process lives on by itself.

        The addresses go with the last tensor or view; until then such a one reads zeros.
        """
        pages, self._pages, self._tensor = self._pages, None, None
        if pages is not None:
            pages.release()

    def _mapped(self) -> Pages:
        if self._pages is None:
            raise ClosedError("the segment was closed")
        return self._pages
