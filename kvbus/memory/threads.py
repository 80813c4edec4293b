"""Owns how many threads torch takes for one copy in this process.

Refuses to speed a single copy up: an agent copies in threads of its own, a few at a time.
"""

import torch


def copy_on_one_thread() -> None:
    """Let torch do every operation, of any thread, in the thread that calls it.

    Its own threads wait for each other. On 2 cores with something else running, a copy by two
    of them took 8 ms instead of 0.2.
    """
    torch.set_num_threads(1)
