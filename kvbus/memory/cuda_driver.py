"""The calls of the CUDA driver that torch does not offer: memory of one process, opened by another.

Each function is one call, made with the GPU's primary context, which torch uses too. A failure is
a `SegmentError` that has CUDA's own name for it.

Torch can share storages between processes as well. It is not used, as what it opens stays open for
as long as any tensor, view or traceback refers to it, when a dead engine's memory has to be free
within a second; and as it counts references in files of shared memory, which an engine that is
killed leaves behind. Handles of the driver are closed when we say so, and need nothing else.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from kvbus.errors import SegmentError

HANDLE_BYTES = 64
"""Of a memory handle, and of an event's."""
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_NO_SUCH_MEMORY = (1, 500)  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND


class _Handle(ctypes.Structure):
    """A `CUipcMemHandle`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@contextmanager
def on_gpu(ordinal: int) -> Iterator[None]:
    """Make calls of this thread be about one GPU, by the number that this process gives it."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", device)


def allocation_of(address: int) -> tuple[int, int] | None:
    """Where the allocation that has ``address`` begins, and its bytes; None if CUDA does not say.

    It may not of memory that another process allocated.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    arguments = ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    code = _driver().cuMemGetAddressRange_v2(*arguments)
    if code in _NO_SUCH_MEMORY:
        return None
    _check(code, "cuMemGetAddressRange")
    return base.value, size.value


def export_memory(base: int) -> bytes:
    """The handle of the allocation that begins at ``base``; one that was made by parts has none."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle.reserved)


def open_memory(handle: bytes) -> int:
    """Map an allocation of another process; returns where it begins here."""
    address = ctypes.c_uint64()
    by_value = _Handle.from_buffer_copy(handle)
    _call(
        "cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_LAZY_PEER_ACCESS)
    )
    return address.value


def close_memory(address: int) -> None:
    """End what `open_memory` began; nothing may use the memory any more."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise SegmentError(
            f"this process finds no NVIDIA driver ({_LIBRARY}): in a container, start it with "
            "access to the GPUs"
        ) from error
    code = driver.cuInit(ctypes.c_uint(0))
    if code:
        raise SegmentError(f"the NVIDIA driver does not start: CUDA error {code}", cuda_error=code)
    return driver


def _call(name: str, *arguments: object) -> None:
    _check(getattr(_driver(), name)(*arguments), name.removesuffix("_v2"))


def _check(code: int, name: str) -> None:
    if not code:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
    known = text.value.decode() if text.value else f"CUDA error {code}"
    raise SegmentError(f"{name}: {known}", cuda_error=code)
