"""Thread pools whose threads run from the start, and interpreter settings for short pauses."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def started_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Start all threads, so that a later limit on threads cannot make ``submit`` fail.

    Raises `RuntimeError` when one cannot start.
    """
    threads, all_run = ThreadPoolExecutor(number, name), Barrier(number)
    try:
        for _ in range(number):
            threads.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        raise
    return threads


def settle_interpreter() -> None:
    """Reduce the pauses that the interpreter causes during handoffs; call it after all imports.

    Measured at 1,400 handoffs per second: garbage collections that scan imported modules pause the
    loop for up to 150 ms. Without them the p99 falls from 170 to 65 ms. The switch interval, 5 ms
    by default, is how long another thread may delay the loop.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 1_000)
    sys.setswitchinterval(0.0005)
