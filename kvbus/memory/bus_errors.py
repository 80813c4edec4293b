"""SIGBUS of this process: who touches memory that its owner cut lives, and is told.

Any other bus error ends the process as it would have.
"""

import ctypes
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvbus.memory import libc

_SA_SIGINFO = 4
_ADDRESS_OFFSET = 16  # of si_addr, on Linux of 64 bits
_MASK_BYTES = 128

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
OnCut = Callable[[], object]
"""Called in the thread that touched the memory: it must not wait for anything."""


class _Action(ctypes.Structure):
    """``struct sigaction`` of glibc."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * _MASK_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


# Memory of a file that an engine could not seal goes when the engine truncates the file. The next
# access to it is SIGBUS, in whatever thread of this process it is: a copy of torch's, or UCX that
# serves a peer. That ends the process, and with it the handoffs of all other engines.
#
#     load or store ──▶ SIGBUS ──▶ whose address?
#                                   a watched mapping   its owner is told, then zeros under all of
#                                                       it; the same instruction goes on
#                                   any other           as before us: the process ends
#
# `signal.signal` is of no use: Python runs its handlers later, in the main thread, and the
# instruction would fault for ever. So the handler of the C library's `sigaction` is a callback of
# ctypes, which takes the GIL. That is safe here, though not in general: a fault at a watched
# address comes from a copy of KV, never from inside of malloc or of the interpreter; copies hold no
# lock that a thread with the GIL waits for, as torch and NIXL are called without it, and NIXL by
# one thread only. Nothing that waits may be done in it.
class BusErrors:
    """Mappings whose bytes may go; once it is installed, this process outlives that."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[int, OnCut]] = {}
        self._handler = _Handler(self._handle)  # as long as it is installed
        self._before = _Action()
        self._unknown: tuple[int, int] | None = None

    def watch(self, address: int, length_bytes: int, on_cut: OnCut) -> None:
        """Survive that the bytes of a mapping go; ``on_cut`` is told, of each thread's fault."""
        self._watched[address] = length_bytes, on_cut

    def unwatch(self, address: int) -> None:
        """The mapping is of no file any more; idempotent."""
        self._watched.pop(address, None)

    def install(self) -> None:
        """Handle SIGBUS from now on; call it again after libraries that do. Raises ``OSError``."""
        handler, before = ctypes.cast(self._handler, ctypes.c_void_p).value, _Action()
        _sigaction(_Action(handler=handler, flags=_SA_SIGINFO), before)
        if before.handler != handler:
            self._before = before

    def restore(self) -> None:
        """Leave SIGBUS to whoever had it before."""
        _sigaction(self._before, None)

    def _handle(self, _number: int, siginfo: int, _context: Any) -> None:
        address = ctypes.c_void_p.from_address(siginfo + _ADDRESS_OFFSET).value or 0
        if self._mended(address):
            return
        # Another thread may have mended it, and its owner unwatched it since: try once more.
        unknown = threading.get_ident(), address
        if self._unknown == unknown:
            self.restore()  # the same access faults again, and ends the process
        self._unknown = unknown

    def _mended(self, address: int) -> bool:
        for first, (length_bytes, on_cut) in list(self._watched.items()):
            if first <= address < first + length_bytes:
                with suppress(Exception):
                    on_cut()
                    libc.map_zeros_over(first, length_bytes)
                    return True
        return False


def _sigaction(new: _Action, old: _Action | None) -> None:
    before = None if old is None else ctypes.addressof(old)
    libc.set_signal_action(signal.SIGBUS, ctypes.addressof(new), before)
