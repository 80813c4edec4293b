"""What memory that must be given back has in common: a ``with`` block that ends it, a warning."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from kvbus.errors import ClosedError, GeometryError

if TYPE_CHECKING:
    import torch


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
        if not self.closed:
            what = f"{type(self).__name__} of {self.size_bytes} bytes"
            warnings.warn(f"{what} was never closed", ResourceWarning, stacklevel=2)


class OwnedStorage(OwnedMemory):
    """A torch storage that an engine passes to its agent; alive until it is closed."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage: torch.UntypedStorage | None = storage
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
