"""The NVIDIA driver, loaded without torch."""

import ctypes
from functools import cache

from kvbus.errors import SegmentError

_LIBRARY = "libcuda.so.1"


@cache
def nvidia_driver() -> ctypes.CDLL:
    """May block for seconds. Raises `SegmentError`."""
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


def check_has_gpu() -> None:
    count = ctypes.c_int()
    if nvidia_driver().cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        raise SegmentError(
            "the NVIDIA driver shows this process no GPU: check CUDA_VISIBLE_DEVICES"
        )
