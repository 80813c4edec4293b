"""A bare NIXL process of a benchmark: ``python -m kvbus.lab.bare_pair SIZE ROWS.npz``."""

import os
import sys
from functools import partial

import numpy as np

from kvbus.data.bare_agent import BareAgent
from kvbus.lab.process import run_program, serve

if __name__ == "__main__":
    with np.load(sys.argv[2]) as given:
        bare = BareAgent(int(sys.argv[1]), dict(given))
    run_program(partial(serve, bare))
    os._exit(0)  # remaining NIXL threads may hang in its destructors
