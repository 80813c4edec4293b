"""Thread pools, and interpreter settings for short pauses."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def started_threads(number: int, name: str) -> ThreadPoolExecutor:
    """A later limit on threads cannot make ``submit`` fail. Raises `RuntimeError`."""
    threads, all_run = ThreadPoolExecutor(number, name), Barrier(number)
    try:
        for _ in range(number):
            threads.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        raise
    return threads


def settle_interpreter() -> None:
    """Call it after all imports.

    At 1,400 handoffs per second, garbage collections of imported modules pause the loop for up to
    150 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 1_000)
    sys.setswitchinterval(0.0005)
