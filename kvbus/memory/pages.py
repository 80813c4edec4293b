"""Owns one mapping of a memory file in this process: its address, its views, its end.

NIXL and kernels know the address without Python knowing of them. So the pages go only when
``release`` asks for it, and the addresses only after the last numpy or torch view of them is gone.
"""

import contextlib
import time
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbus.memory import libc

_POPULATED_AT_ONCE_BYTES = 1 << 28


class Pages:
    """The pages of a memory file, mapped shared, readable and writable. Raises ``OSError``."""

    def __init__(self, fd: int, length_bytes: int) -> None:
        self.address = libc.map_shared(fd, length_bytes)
        self.length_bytes = length_bytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What numpy reads to make a view that keeps this object alive."""
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.length_bytes,),
            "data": (self.address, False),
        }

    def view(self) -> npt.NDArray[np.uint8]:
        """Return all bytes, writable."""
        return np.asarray(self)

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
                libc.populate(self.address + offset, length)

    # An engine dies while NIXL reads from its memory, or writes into it. NIXL cannot cancel, and
    # has only addresses. To unmap them would crash this process, or let the bytes land in whatever
    # is mapped there next. So one mmap puts other pages under the same addresses, with no moment
    # at which nothing is there:
    #
    #     before   address ──▶ pages of the file (the engine's KV)
    #     discard  address ──▶ private zeros; the file's pages are free once nobody else maps them
    #     release  as discard; the addresses go when the last view is collected
    #
    # A page of zeros costs memory only when something is written into it.
    def discard(self) -> None:
        """Drop the file's pages and leave zeros at the same addresses; live views stay usable."""
        libc.map_zeros_over(self.address, self.length_bytes)

    def release(self) -> None:
        """Discard now; give the addresses back when the last view and the owner have let go."""
        self.discard()
        finalizer = weakref.finalize(self, libc.unmap, self.address, self.length_bytes)
        finalizer.atexit = False  # at exit, views may be alive and the kernel cleans up anyway
