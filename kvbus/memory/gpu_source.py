"""How a process names its GPU memory to others."""

import os
from collections.abc import Iterable

import msgspec
from msgspec import structs

from kvbus.errors import SegmentError


class GpuSource(msgspec.Struct, frozen=True, array_like=True):
    """Memory ``offset_bytes`` into an allocation of the GPU ``device``, or into all ``parts``.

    ``handle`` is that of a whole allocation. Otherwise each part, in address order and of these
    bytes, comes as a POSIX descriptor.
    """

    device: str
    offset_bytes: int
    handle: bytes = b""
    parts: tuple[int, ...] = ()

    def check_kind(self) -> None:
        """Raises `SegmentError`."""
        if bool(self.handle) == bool(self.parts):
            raise SegmentError("GPU memory comes with either a handle or parts")

    def check(self, size_bytes: int) -> None:
        """Raise `SegmentError` for a source that no driver could open."""
        self.check_kind()
        if self.parts and self.offset_bytes + size_bytes > sum(self.parts):
            raise SegmentError(
                f"{size_bytes} bytes from byte {self.offset_bytes} on were claimed of parts of "
                f"{sum(self.parts)} bytes",
                claimed_bytes=self.offset_bytes + size_bytes,
                actual_bytes=sum(self.parts),
            )


class PassedGpuMemory:
    """Memory that an engine has passed; it owns the descriptors of the parts."""

    def __init__(self, source: GpuSource, size_bytes: int, fds: Iterable[int]) -> None:
        self.source, self.size_bytes, self.fds = source, size_bytes, list(fds)

    @property
    def device(self) -> str:
        return self.source.device

    @property
    def is_whole(self) -> bool:
        needed_bytes = self.source.offset_bytes + self.size_bytes
        return bool(self.source.handle) or sum(self.source.parts) >= needed_bytes

    def add(self, source: GpuSource, size_bytes: int, fds: Iterable[int]) -> None:
        """Add further parts. Raises `SegmentError` for those of another segment."""
        mine = structs.replace(self.source, parts=())
        if (
            self.is_whole
            or size_bytes != self.size_bytes
            or structs.replace(source, parts=()) != mine
        ):
            raise SegmentError("further parts are of another segment than the first ones")
        self.source = structs.replace(mine, parts=self.source.parts + source.parts)
        self.fds += fds

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())
