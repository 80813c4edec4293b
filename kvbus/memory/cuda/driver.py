"""Calls of the CUDA driver for memory of another process.

Each call uses the GPU's primary context, as torch does. Torch keeps an opened storage while any
view or traceback refers to it. A dead engine's memory must be free within a second.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvbus.errors import SegmentError
from kvbus.memory.nvidia import nvidia_driver

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_NO_SUCH_MEMORY = (1, 500)  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@contextmanager
def on_gpu(ordinal: int) -> Iterator[None]:
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
    base, size, at = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(address)
    code = nvidia_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at)
    if code in _NO_SUCH_MEMORY:
        return None
    _check(code, "cuMemGetAddressRange")
    return base.value, size.value


def export_memory(base: int) -> bytes:
    """An allocation that is mapped in parts has no handle."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle.reserved)


def open_memory(handle: bytes) -> int:
    address, flags = ctypes.c_uint64(), ctypes.c_uint(_LAZY_PEER_ACCESS)
    by_value = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, flags)
    return address.value


def close_memory(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _call(name: str, *arguments: object) -> None:
    _check(getattr(nvidia_driver(), name)(*arguments), name.removesuffix("_v2"))


def _check(code: int, call: str) -> None:
    if not code:
        return
    error_name = ctypes.c_char_p()
    nvidia_driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(error_name))
    reason = error_name.value.decode() if error_name.value else f"CUDA error {code}"
    raise SegmentError(f"{call}: {reason}", cuda_error=code)


def gpu_uuid(ordinal: int) -> str:
    """Return the UUID as ``nvidia-smi -L`` prints it."""
    return f"GPU-{str(torch.cuda.get_device_properties(ordinal).uuid).removeprefix('GPU-')}"


def gpu_ordinal(uuid: str) -> int:
    check_cuda()
    visible = [gpu_uuid(ordinal) for ordinal in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise SegmentError(
            f"this process does not see {uuid}, but {', '.join(visible)}: start it with a "
            "CUDA_VISIBLE_DEVICES that has it, or none",
            device=uuid,
        )
    return visible.index(uuid)


def seen_gpus() -> tuple[str, list[tuple[str, str, int]]]:
    """Return torch's CUDA version, and UUID, name and bytes per GPU; raises `RuntimeError`."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is built without CUDA")
    torch.cuda.init()  # type: ignore[no-untyped-call]  # untyped; its error has the reason
    found = [torch.cuda.get_device_properties(num) for num in range(torch.cuda.device_count())]
    if not found:
        raise RuntimeError("no GPU is visible: check CUDA_VISIBLE_DEVICES")
    gpus = [(gpu_uuid(number), one.name, one.total_memory) for number, one in enumerate(found)]
    return torch.version.cuda, gpus


def gpu_of(device: torch.device) -> int:
    check_cuda()
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    if ordinal >= torch.cuda.device_count():
        raise SegmentError(
            f"there is no {device}: this process sees {torch.cuda.device_count()} GPUs"
        )
    return ordinal


def check_cuda() -> None:
    if torch.version.cuda is None:
        raise SegmentError(
            f"torch {torch.__version__} of this process has no CUDA: install a build of torch "
            "for CUDA, or use shared memory"
        )
    if not torch.cuda.is_available():
        raise SegmentError(
            "torch of this process sees no GPU: is the NVIDIA driver there, and "
            "CUDA_VISIBLE_DEVICES not empty?"
        )
