"""Thread pools whose threads run from the start."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def started_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads all run: no later limit on threads makes ``submit`` fail.

    Raises `RuntimeError` when one cannot be started.
    """
    threads, all_run = ThreadPoolExecutor(number, name), Barrier(number)
    try:
        for _ in range(number):
            threads.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        raise
    return threads
