"""Words of host memory that a GPU writes in the order of a stream. Needs no torch."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from kvbus.errors import SegmentError
from kvbus.memory.nvidia import nvidia_driver

_PORTABLE_AND_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_CAN_WRITE_64_BITS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_WITH_A_BARRIER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes of the stream are visible first


class StreamWords:
    """The words of a page at ``address``, for streams of one GPU. Raises `SegmentError`."""

    def __init__(self, ordinal: int, address: int, size_bytes: int) -> None:
        self._device, self._address = _device(ordinal), address
        self._context, at = ctypes.c_void_p(), ctypes.c_uint64()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        try:
            with self._current():
                size, flags = ctypes.c_size_t(size_bytes), ctypes.c_uint(_PORTABLE_AND_MAPPED)
                _call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, flags)
                page = ctypes.c_void_p(address)
                _call("cuMemHostGetDevicePointer_v2", ctypes.byref(at), page, ctypes.c_uint(0))
        except SegmentError:
            _call("cuDevicePrimaryCtxRelease_v2", self._device)
            raise
        self._at = at.value
        self._write = nvidia_driver().cuStreamWriteValue64_v2

    def write(self, stream: int, word: int, number: int) -> None:
        """Queue the write behind the work so far on ``stream``, a ``CUstream``."""
        at, value = ctypes.c_uint64(self._at + 8 * word), ctypes.c_uint64(number)
        with self._current():
            code = self._write(ctypes.c_void_p(stream), at, value, ctypes.c_uint(_WITH_A_BARRIER))
        _check(code, "cuStreamWriteValue64")

    def close(self) -> None:
        """Wait for queued writes; the page may be unmapped afterwards."""
        with self._current():
            _call("cuCtxSynchronize")
            _call("cuMemHostUnregister", ctypes.c_void_p(self._address))
        _call("cuDevicePrimaryCtxRelease_v2", self._device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            popped = ctypes.c_void_p()
            _call("cuCtxPopCurrent_v2", ctypes.byref(popped))


def _device(ordinal: int) -> ctypes.c_int:
    device, can_write = ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call("cuDeviceGetAttribute", ctypes.byref(can_write), ctypes.c_int(_CAN_WRITE_64_BITS), device)
    if not can_write.value:
        raise SegmentError(
            f"GPU {ordinal} cannot write sequence numbers: it or its driver has no 64-bit memory "
            "operations of streams. Use a bounce buffer (kvbus.engine.bounce), or host memory"
        )
    return device


def _call(name: str, *arguments: object) -> None:
    _check(getattr(nvidia_driver(), name)(*arguments), name.removesuffix("_v2"))


def _check(code: int, call: str) -> None:
    if code:
        raise SegmentError(f"{call}: CUDA error {code}", cuda_error=code)
