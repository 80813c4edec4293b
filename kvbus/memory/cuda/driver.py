"""GPUs by UUID, and the calls of the CUDA driver that torch does not offer.

Those are for memory of one process that is opened by another.
Each is one call, made with the GPU's primary context, which torch uses too. A failure is a
`SegmentError` that has CUDA's own name for it.

Torch can share storages between processes as well. It is not used, as what it opens stays open for
as long as any tensor, view or traceback refers to it, when a dead engine's memory has to be free
within a second; and as it counts references in files of shared memory, which an engine that is
killed leaves behind. Handles of the driver are closed when we say so, and need nothing else.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvbus.errors import SegmentError
from kvbus.memory.nvidia import nvidia_driver

HANDLE_BYTES = 64
"""Of a memory handle, and of an event's."""
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
    base, size, at = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(address)
    code = nvidia_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at)
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
    address, flags = ctypes.c_uint64(), ctypes.c_uint(_LAZY_PEER_ACCESS)
    by_value = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, flags)
    return address.value


def close_memory(address: int) -> None:
    """End what `open_memory` began; nothing may use the memory any more."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _call(name: str, *arguments: object) -> None:
    _check(getattr(nvidia_driver(), name)(*arguments), name.removesuffix("_v2"))


def _check(code: int, name: str) -> None:
    if not code:
        return
    text = ctypes.c_char_p()
    nvidia_driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
    known = text.value.decode() if text.value else f"CUDA error {code}"
    raise SegmentError(f"{name}: {known}", cuda_error=code)


def gpu_uuid(ordinal: int) -> str:
    """The UUID of a GPU that torch numbers so, as ``nvidia-smi -L`` prints it."""
    return f"GPU-{str(torch.cuda.get_device_properties(ordinal).uuid).removeprefix('GPU-')}"


def gpu_ordinal(uuid: str) -> int:
    """The number that torch has for a GPU; raises `SegmentError` when it does not see it."""
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
    """The CUDA of torch; UUID, name and bytes of each GPU that it sees. `RuntimeError` of none."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is built without CUDA")
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no type; says why it cannot
    found = [torch.cuda.get_device_properties(num) for num in range(torch.cuda.device_count())]
    if not found:
        raise RuntimeError("no GPU is visible: look at CUDA_VISIBLE_DEVICES")
    gpus = [(gpu_uuid(number), one.name, one.total_memory) for number, one in enumerate(found)]
    return torch.version.cuda, gpus


def gpu_of(device: torch.device) -> int:
    """The number of a CUDA device, the current one when it names none; raises `SegmentError`."""
    check_cuda()
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    if ordinal >= torch.cuda.device_count():
        raise SegmentError(
            f"there is no {device}: this process sees {torch.cuda.device_count()} GPUs"
        )
    return ordinal


def check_cuda() -> None:
    """Raise `SegmentError` unless torch can use a GPU here."""
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
