"""What memory that must be given back has in common: a ``with`` block that ends it, a warning."""

import warnings
from abc import ABC, abstractmethod
from typing import Self


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
