"""The CUDA driver's calls, for tests: each raises `CudaError` unless it succeeds."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

import pytest

PAGE = 2 << 20
NON_BLOCKING = 1
READ, READ_AND_WRITE = 1, 3
POSIX_DESCRIPTOR = 1


class CudaError(Exception):
    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * 64),)


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", c_int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    )


class CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("order", c_int),
        ("source", Location),
        ("target", Location),
        ("flags", c_uint),
    )


class Cuda:
    """``cuda.cuMemFree_v2(at)`` and so on; integers go as 64 bits unless they are of ctypes."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name)

        def call(*arguments: Any) -> None:
            code = function(*(c_uint64(a) if isinstance(a, int) else a for a in arguments))
            if code:
                text = ctypes.c_char_p()
                self.library.cuGetErrorName(code, byref(text))
                raise CudaError(name, code, (text.value or b"?").decode())

        return call

    def start(self, ordinal: int = 0) -> None:
        """Have a context for this thread, for good."""
        self.cuInit(0)
        self.cuCtxPushCurrent_v2(self.retain(ordinal))

    def retain(self, ordinal: int) -> c_void_p:
        context = c_void_p()
        self.cuDevicePrimaryCtxRetain(byref(context), c_int(ordinal))
        return context

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """The primary context, which the process keeps, is that of this thread."""
        self.cuCtxPushCurrent_v2(self.retain(ordinal))
        try:
            yield
        finally:
            self.cuCtxPopCurrent_v2(None)

    def get(self, kind: Any, name: str, *arguments: Any) -> Any:
        """What a call writes where its first argument points to."""
        made = kind()
        getattr(self, name)(byref(made), *arguments)
        return made.value if hasattr(made, "value") else made

    def alloc(self, size_bytes: int) -> int:
        return int(self.get(c_uint64, "cuMemAlloc_v2", size_bytes))

    def stream(self, flags: int = NON_BLOCKING) -> c_void_p:
        stream = c_void_p()
        self.cuStreamCreate(byref(stream), c_uint(flags))
        return stream

    def write(self, at: int, content: bytes) -> None:
        self.cuMemcpyHtoD_v2(at, content, len(content))
        self.cuCtxSynchronize()

    def read(self, at: int, size_bytes: int) -> bytes:
        content = ctypes.create_string_buffer(size_bytes)
        self.cuMemcpyDtoH_v2(content, at, size_bytes)
        return content.raw

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value

    def range_of(self, at: int) -> tuple[int, int]:
        base, size = c_uint64(), c_size_t()
        self.cuMemGetAddressRange_v2(byref(base), byref(size), at)
        return base.value, size.value

    def attribute(self, kind: Any, number: int, at: int) -> Any:
        return self.get(kind, "cuPointerGetAttribute", c_int(number), at)

    def ipc_handle(self, at: int) -> bytes:
        return bytes(self.get(IpcHandle, "cuIpcGetMemHandle", at).bytes)

    def open_ipc(self, handle: bytes) -> int:
        by_value = IpcHandle.from_buffer_copy(handle)
        return int(self.get(c_uint64, "cuIpcOpenMemHandle_v2", by_value, c_uint(1)))

    def create(
        self, size_bytes: int, *, ordinal: int = 0, handle_types: int = POSIX_DESCRIPTOR
    ) -> int:
        wanted = AllocationProp(1, handle_types, Location(1, ordinal))
        return int(self.get(c_uint64, "cuMemCreate", size_bytes, byref(wanted), 0))

    def reserve(self, size_bytes: int) -> int:
        return int(self.get(c_uint64, "cuMemAddressReserve", size_bytes, 0, 0, 0))

    def map(self, at: int, size_bytes: int, handle: int) -> None:
        self.cuMemMap(at, size_bytes, 0, handle, 0)

    def set_access(
        self, at: int, size_bytes: int, *, ordinal: int = 0, flags: int = READ_AND_WRITE
    ) -> None:
        wanted = AccessDesc(Location(1, ordinal), flags)
        self.cuMemSetAccess(at, size_bytes, byref(wanted), 1)

    def map_new(self, size_bytes: int, *, handle_types: int = POSIX_DESCRIPTOR) -> int:
        """The address of memory whose handle is released."""
        handle = self.create(size_bytes, handle_types=handle_types)
        at = self.reserve(size_bytes)
        self.map(at, size_bytes, handle)
        self.set_access(at, size_bytes)
        self.cuMemRelease(handle)
        return at

    def export(self, at: int) -> int:
        """A descriptor of memory that is mapped there."""
        handle = self.get(c_uint64, "cuMemRetainAllocationHandle", at)
        try:
            return int(self.get(c_int, "cuMemExportToShareableHandle", handle, c_int(1), 0))
        finally:
            self.cuMemRelease(handle)

    def import_fd(self, fd: int) -> int:
        return int(self.get(c_uint64, "cuMemImportFromShareableHandle", fd, c_int(1)))


@contextmanager
def refused(code: int) -> Iterator[None]:
    """The block ends with this error of CUDA."""
    with pytest.raises(CudaError) as found:
        yield
    assert found.value.code == code, f"not {code}, but {found.value}"
