"""SIGBUS handling: a process that touches truncated memory survives."""

import ctypes
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvbus.memory import libc

_SA_SIGINFO = 4
_ADDRESS_OFFSET = 16  # of si_addr, on 64-bit Linux
_MASK_BYTES = 128

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
OnTruncated = Callable[[], object]
"""Runs in each thread that touches the memory; must not block."""


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * _MASK_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


# An engine can truncate a file that it could not seal. The next access to the lost pages raises
# SIGBUS in any thread of this process: in a copy of torch, or in UCX while it serves a peer. That
# ends the process, and with it the handoffs of all other engines.
#
#     load or store ──▶ SIGBUS ──▶ which address?
#                                   in a watched mapping   run its callback, map zeros over all of
#                                                          it, and retry the instruction
#                                   any other              as without the handler: the process ends
#
# `signal.signal` does not help: Python runs its handlers later, in the main thread, and the
# instruction would fault forever. So the handler is a ctypes callback for `sigaction` of the C
# library, and it takes the GIL. That is not safe in general, but it is here. A fault at a watched
# address comes from a copy of KV, never from inside malloc or the interpreter. Copies hold no lock
# that a thread with the GIL waits for: torch and NIXL are called without the GIL, and NIXL by one
# thread only. The handler must not block.
class BusErrors:
    def __init__(self) -> None:
        self._watched: dict[int, tuple[int, OnTruncated]] = {}
        self._handler = _Handler(self._handle)  # keeps the callback alive while it is installed
        self._before = _Action()
        self._unknown: tuple[int, int] | None = None

    def watch(self, address: int, length_bytes: int, on_cut: OnTruncated) -> None:
        self._watched[address] = length_bytes, on_cut

    def unwatch(self, address: int) -> None:
        self._watched.pop(address, None)

    def install(self) -> None:
        """Install the handler; repeat after libraries that do. Raises ``OSError``."""
        handler, before = ctypes.cast(self._handler, ctypes.c_void_p).value, _Action()
        _sigaction(_Action(handler=handler, flags=_SA_SIGINFO), before)
        if before.handler != handler:
            self._before = before

    def restore(self) -> None:
        _sigaction(self._before, None)

    def _handle(self, _number: int, siginfo: int, _context: Any) -> None:
        address = ctypes.c_void_p.from_address(siginfo + _ADDRESS_OFFSET).value or 0
        if self._mend(address):
            return
        # Another thread may have mended the mapping, and its owner unwatched it since: retry once.
        unknown = threading.get_ident(), address
        if self._unknown == unknown:
            self.restore()  # the same access faults again, and ends the process
        self._unknown = unknown

    def _mend(self, address: int) -> bool:
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
