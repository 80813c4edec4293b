"""A process with memory to read, for the transport benchmarks: prints where it is, and serves."""

import json
import sys

import numpy as np

from kvbus.transport import Transport


def main() -> None:
    """Serve until stdin closes."""
    transport = Transport("target/bench")
    transport.start().result()
    memory = np.ones(int(sys.argv[1]), np.uint8)
    transport.register(memory.ctypes.data, memory.nbytes).result()
    metadata = transport.metadata().result().hex()
    with transport.hold_progress():
        print(json.dumps({"address": memory.ctypes.data, "metadata": metadata}), flush=True)
        sys.stdin.read()


main()
