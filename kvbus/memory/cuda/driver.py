"""Calls of the CUDA driver, without torch. Each raises `SegmentError` with the name of its error.

Calls that need a context use the GPU's primary one, which torch and UCX use too.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvbus.errors import SegmentError
from kvbus.memory.nvidia import error_name, nvidia_driver

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_UNKNOWN = (1, 500)  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND
INVALID_CONTEXT = 201
POSIX_DESCRIPTOR = 1
_ON_DEVICE, _READ_WRITE = 1, 3
_PORTABLE_AND_MAPPED = 3
_NON_BLOCKING = 1
_RECOMMENDED = 1

BUFFER_ID, RANGE_SIZE = 7, 12
MAPPING_SIZE, MAPPING_BASE = 18, 19
NUM_PROCESSORS, STREAMS_WRITE_64_BITS = 16, 122


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_contexts: dict[int, ctypes.c_void_p] = {}
_lock = threading.Lock()


@contextmanager
def on_gpu(ordinal: int) -> Iterator[None]:
    """Make the GPU's primary context current in this thread; it stays alive in this process."""
    with _lock:
        if ordinal not in _contexts:
            context = ctypes.c_void_p()
            call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(ordinal))
            _contexts[ordinal] = context
    call("cuCtxPushCurrent_v2", _contexts[ordinal])
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def call(name: str, *arguments: object) -> None:
    _check(getattr(nvidia_driver(), name)(*arguments), name)


def _check(code: int, name: str) -> None:
    if not code:
        return
    reason = error_name(nvidia_driver(), code)
    raise SegmentError(f"{name.partition('_')[0]}: {reason}", cuda_error=code)


# GPUs.


def _device(ordinal: int) -> ctypes.c_int:
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    return device


def num_gpus() -> int:
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def driver_version() -> str:
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def uuid_bytes(ordinal: int, *, of_instance: bool) -> bytes:
    """Under MIG, the UUID of the instance or of its GPU; else both are alike."""
    uuid = (ctypes.c_ubyte * 16)()
    name = "cuDeviceGetUuid_v2" if of_instance else "cuDeviceGetUuid"
    call(name, ctypes.byref(uuid), _device(ordinal))
    return bytes(uuid)


def gpu_name(ordinal: int) -> str:
    name = ctypes.create_string_buffer(256)
    call("cuDeviceGetName", name, ctypes.c_int(len(name)), _device(ordinal))
    return name.value.decode()


def gpu_bytes(ordinal: int) -> int:
    size = ctypes.c_size_t()
    call("cuDeviceTotalMem_v2", ctypes.byref(size), _device(ordinal))
    return size.value


def free_bytes(ordinal: int) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with on_gpu(ordinal):
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def attribute(ordinal: int, number: int) -> int:
    value = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), _device(ordinal))
    return value.value


def can_access(ordinal: int, other: int) -> bool:
    can = ctypes.c_int()
    call("cuDeviceCanAccessPeer", ctypes.byref(can), _device(ordinal), _device(other))
    return bool(can.value)


# Memory of this process. A context must be current.


def allocate(size_bytes: int) -> int:
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
    return address.value


def free(address: int) -> None:
    call("cuMemFree_v2", ctypes.c_uint64(address))


def pin(address: int, size_bytes: int) -> int:
    """Pin host memory, and return its address on the GPUs."""
    host, size = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)
    call("cuMemHostRegister_v2", host, size, ctypes.c_uint(_PORTABLE_AND_MAPPED))
    found = ctypes.c_uint64()
    try:
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), host, ctypes.c_uint(0))
    except SegmentError:
        unpin(address)
        raise
    return found.value


def unpin(address: int) -> None:
    call("cuMemHostUnregister", ctypes.c_void_p(address))


def pointer_attribute(number: int, address: int) -> int | None:
    """Return None for an unknown address, or an attribute that the driver does not know."""
    value = ctypes.c_uint64()
    number_, at = ctypes.c_int(number), ctypes.c_uint64(address)
    code = nvidia_driver().cuPointerGetAttribute(ctypes.byref(value), number_, at)
    if code in _UNKNOWN:
        return None
    _check(code, "cuPointerGetAttribute")
    return value.value


def allocation_of(address: int) -> tuple[int, int] | None:
    """Return address and bytes of the whole allocation."""
    base, size, at = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(address)
    code = nvidia_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at)
    if code in _UNKNOWN:
        return None
    _check(code, "cuMemGetAddressRange")
    return base.value, size.value


# Legacy IPC: memory of cuMemAlloc and cudaMalloc.


def export_handle(base: int) -> bytes:
    handle = _IpcHandle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle.reserved)


def open_handle(handle: bytes) -> int:
    """Also makes the memory accessible to the GPU whose context is current."""
    address, flags = ctypes.c_uint64(), ctypes.c_uint(_LAZY_PEER_ACCESS)
    by_value = _IpcHandle.from_buffer_copy(handle)
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, flags)
    return address.value


def close_handle(address: int) -> None:
    call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


# Virtual memory management: memory of cuMemCreate, which is mapped in parts.


def retain_part(address: int) -> int | None:
    """Return the handle of the physical memory at ``address``; None for cuMemAlloc's memory."""
    handle, at = ctypes.c_uint64(), ctypes.c_void_p(address)
    code = nvidia_driver().cuMemRetainAllocationHandle(ctypes.byref(handle), at)
    if code in _UNKNOWN:
        return None
    _check(code, "cuMemRetainAllocationHandle")
    return handle.value


def release_part(handle: int) -> None:
    call("cuMemRelease", ctypes.c_uint64(handle))


def handle_types_of(handle: int) -> int:
    found = _AllocationProperties()
    name = "cuMemGetAllocationPropertiesFromHandle"
    call(name, ctypes.byref(found), ctypes.c_uint64(handle))
    return int(found.handle_types)


def export_part(handle: int) -> int:
    """Return a new descriptor."""
    fd = ctypes.c_int(-1)
    name, kind = "cuMemExportToShareableHandle", ctypes.c_int(POSIX_DESCRIPTOR)
    call(name, ctypes.byref(fd), ctypes.c_uint64(handle), kind, ctypes.c_ulonglong(0))
    return fd.value


def create_part(size_bytes: int, ordinal: int) -> int:
    """Allocate physical memory; ``size_bytes`` is a multiple of `part_alignment`."""
    wanted = _AllocationProperties(1, POSIX_DESCRIPTOR, _Location(_ON_DEVICE, ordinal))
    handle, size = ctypes.c_uint64(), ctypes.c_size_t(size_bytes)
    properties, flags = ctypes.byref(wanted), ctypes.c_ulonglong(0)
    call("cuMemCreate", ctypes.byref(handle), size, properties, flags)
    return handle.value


def import_part(fd: int) -> int:
    handle, kind = ctypes.c_uint64(), ctypes.c_int(POSIX_DESCRIPTOR)
    call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), kind)
    return handle.value


def part_alignment(ordinal: int) -> int:
    wanted = _AllocationProperties(1, POSIX_DESCRIPTOR, _Location(_ON_DEVICE, ordinal))
    found = ctypes.c_size_t()
    name, kind = "cuMemGetAllocationGranularity", ctypes.c_int(_RECOMMENDED)
    call(name, ctypes.byref(found), ctypes.byref(wanted), kind)
    return found.value


def reserve(size_bytes: int, alignment: int) -> int:
    address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
    sizes = ctypes.c_size_t(size_bytes), ctypes.c_size_t(alignment)
    call("cuMemAddressReserve", ctypes.byref(address), *sizes, zero, ctypes.c_ulonglong(0))
    return address.value


def unreserve(address: int, size_bytes: int) -> None:
    call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))


def map_part(address: int, size_bytes: int, handle: int) -> None:
    at, size = ctypes.c_uint64(address), ctypes.c_size_t(size_bytes)
    zero = ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_ulonglong(0)
    call("cuMemMap", at, size, *zero)


def unmap(address: int, size_bytes: int) -> None:
    call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))


def allow_access(address: int, size_bytes: int, ordinals: list[int]) -> None:
    access = (_Access * len(ordinals))()
    for one, ordinal in zip(access, ordinals, strict=True):
        one.location, one.flags = _Location(_ON_DEVICE, ordinal), _READ_WRITE
    at, size = ctypes.c_uint64(address), ctypes.c_size_t(size_bytes)
    call("cuMemSetAccess", at, size, access, ctypes.c_size_t(len(ordinals)))


# Bytes, from and to pageable host memory.


def write_bytes(ordinal: int, address: int, content: bytes) -> None:
    with on_gpu(ordinal):
        call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))
        synchronize(stream=0)  # CUDA may return while the last bytes are on their way


def read_bytes(ordinal: int, address: int, size_bytes: int) -> bytes:
    content = ctypes.create_string_buffer(size_bytes)
    with on_gpu(ordinal):
        call("cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
    return content.raw


# Streams, and work on them.


def new_stream() -> int:
    stream = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    return stream.value or 0


def synchronize(stream: int) -> None:
    call("cuStreamSynchronize", ctypes.c_void_p(stream))


def copy_async(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Each side is GPU memory or host memory; only pinned host memory is copied in parallel."""
    sides = ctypes.c_uint64(target), ctypes.c_uint64(source)
    call("cuMemcpyAsync", *sides, ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream))


def synchronize_all() -> None:
    call("cuCtxSynchronize")


def write_value(address: int, value: int, stream: int) -> None:
    """Write 8 bytes behind the work so far, whose own writes are visible first."""
    at, number = ctypes.c_uint64(address), ctypes.c_uint64(value)
    call("cuStreamWriteValue64_v2", ctypes.c_void_p(stream), at, number, ctypes.c_uint(0))


def zero_async(address: int, size_bytes: int, stream: int) -> None:
    at, byte = ctypes.c_uint64(address), ctypes.c_ubyte(0)
    call("cuMemsetD8Async", at, byte, ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream))


def load_module(image: bytes) -> int:
    module = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
    return module.value or 0


def find_kernel(module: int, name: str) -> int:
    kernel = ctypes.c_void_p()
    wanted = ctypes.c_void_p(module), ctypes.c_char_p(name.encode())
    call("cuModuleGetFunction", ctypes.byref(kernel), *wanted)
    return kernel.value or 0


def launch(kernel: int, blocks: int, threads: int, stream: int, *arguments: object) -> None:
    """Arguments are ctypes values."""
    shape = [ctypes.c_uint(number) for number in (blocks, 1, 1, threads, 1, 1, 0)]
    places = [ctypes.addressof(one) for one in arguments]  # type: ignore[arg-type]  # ctypes values
    array = (ctypes.c_void_p * len(places))(*places)
    call("cuLaunchKernel", ctypes.c_void_p(kernel), *shape, ctypes.c_void_p(stream), array, None)
