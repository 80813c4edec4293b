"""The NVIDIA driver, loaded without torch."""

import ctypes
from functools import cache

from kvbus.errors import SegmentError

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
_SEE = (
    "start it with access to the GPUs (in a container), and with a CUDA_VISIBLE_DEVICES that has "
    "them, or none"
)


def finds_driver() -> bool:
    """Return whether the library is there; it is loaded, but not started."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


@cache
def nvidia_driver() -> ctypes.CDLL:
    """May block for seconds. Raises `SegmentError`."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise SegmentError(f"this process finds no NVIDIA driver ({_LIBRARY}): {_SEE}") from error
    code = driver.cuInit(ctypes.c_uint(0))
    if code:
        reason = error_name(driver, code)
        if code == _NO_DEVICE:
            reason += f", as this process sees no GPU: {_SEE}"
        raise SegmentError(f"the NVIDIA driver does not start: {reason}", cuda_error=code)
    return driver


def error_name(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA error {code}"
