"""One of two processes with bare NIXL: a target with memory, and a reader that measures.

nixl_read_process target    prints where its memory is, and drives NIXL until its stdin ends
nixl_read_process reader    takes that line, reads for a while, and prints the median rate
"""

import sys

import msgspec

from kvbus.doctor.probe import without_torch  # noqa: F401  # before NIXL
from kvbus.doctor.probe.native import die_with_parent
from kvbus.doctor.probe.nixl import Measured
from kvbus.errors import KVBusError
from kvbus.transport.bare_pair import LONG_BYTES, NUM_PLACES, BareAgent, print_line


def main() -> None:
    """Be what the first argument says; a reader that fails says why and ends with status 1."""
    try:
        agent = BareAgent(f"kvbus-doctor-{sys.argv[1]}", NUM_PLACES * LONG_BYTES)
        if sys.argv[1] == "target":
            agent.serve()
            return
        agent.connect()
        print_line(msgspec.json.encode(Measured(agent.bytes_per_s())).decode())
    except KVBusError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    die_with_parent()
    main()
