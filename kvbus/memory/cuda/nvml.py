"""Memory of GPUs that is in use, by NVIDIA's management library (NVML)."""

import ctypes
from functools import cache

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64))


# A context takes hundreds of MB, of which CUDA reports nothing: it needs a context for any number.
# NVML tells what all processes use, so others that start or end meanwhile blur the result.
def taken_bytes(gpu: str) -> int | None:
    """Return by how much the use of the GPU has grown since the first call in this process.

    Return None without NVML. May block for seconds.
    """
    before, now = _used_at_first_bytes(gpu), _used_bytes(gpu)
    return None if before is None or now is None else max(0, now - before)


@cache
def _used_at_first_bytes(gpu: str) -> int | None:
    return _used_bytes(gpu)


def _used_bytes(gpu: str) -> int | None:
    nvml, device, found = _nvml(), ctypes.c_void_p(), _Memory()
    if nvml is None or nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(device)):
        return None
    return None if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(found)) else int(found.used)


@cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
