"""Thread pools whose threads run from the start."""

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
