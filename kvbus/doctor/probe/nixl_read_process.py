"""One of two processes with bare NIXL: a target with memory, and a reader that measures.

Refuses to count a read whose bytes are wrong.

    nixl_read_process target    prints where its memory is, and drives NIXL until its stdin ends
    nixl_read_process reader    takes that line, reads for a while, and prints the median rate
"""

import os
import select
import statistics
import sys
import time

import msgspec
import numpy as np

from kvbus.doctor.probe import without_torch  # noqa: F401  # before NIXL
from kvbus.doctor.probe.native import die_with_parent
from kvbus.doctor.probe.nixl import Measured
from kvbus.errors import KVBusError
from kvbus.memory.segment import SharedSegment
from kvbus.transport import Registration, TransportLimits
from kvbus.transport.nixl_agent import NixlAgent

READ_BYTES = 8 << 20
"""One slice, as agents post it."""
NUM_PLACES = 4
"""So many in turn: together they are more than most caches hold."""
LEAST_READS, MOST_READS = 8, 64
MEASURE_S = 0.4
_MARK = 0x5A


class Where(msgspec.Struct, frozen=True):
    """What a reader needs of its target."""

    address: int
    metadata: bytes


def serve_target(segment: SharedSegment) -> None:
    """Fill the memory, say where it is, and drive progress, as the target of a read must."""
    agent = _agent("target", segment)
    segment.view()[:] = _MARK
    _say(msgspec.json.encode(Where(segment.address, agent.metadata(None))))
    stdin, poll_s = sys.stdin.fileno(), TransportLimits().poll_s
    while not select.select([stdin], [], [], poll_s)[0]:
        agent.progress()


def measure(segment: SharedSegment) -> None:
    """Read until it is known what a read takes, and say it."""
    line = sys.stdin.readline()
    if not line:
        sys.exit("the other process ended")
    where = msgspec.json.decode(line, type=Where)
    reader = _Reader(_agent("reader", segment), segment, where)
    for place in range(NUM_PLACES):  # connects, and takes the faults of pages
        reader.read_s(place)
    if not (segment.view() == _MARK).all():
        sys.exit("the read brought wrong bytes")
    times_s: list[float] = []
    began = time.perf_counter()
    while len(times_s) < LEAST_READS or (
        len(times_s) < MOST_READS and time.perf_counter() - began < MEASURE_S
    ):
        times_s.append(reader.read_s(len(times_s) % NUM_PLACES))
    _say(msgspec.json.encode(Measured(READ_BYTES / statistics.median(times_s))))


class _Reader:
    """Reads one place of the target into the same place of ours."""

    def __init__(self, agent: NixlAgent, segment: SharedSegment, where: Where) -> None:
        self._agent, self._here, self._there = agent, segment.address, where.address
        self._peer = agent.add_peer(where.metadata)

    def read_s(self, place: int) -> float:
        """Seconds of one READ."""
        offset = place * READ_BYTES
        here, there = (
            np.array([[base + offset, READ_BYTES, 0]], np.uint64)
            for base in (self._here, self._there)
        )
        began = time.perf_counter()
        handle = self._agent.prepare(self._peer, here, there, ("DRAM", "DRAM"))
        done = self._agent.post(handle, self._peer)
        while not done:
            done = self._agent.is_done(handle, self._peer)
        took_s = time.perf_counter() - began
        self._agent.release(handle)
        return took_s


def _agent(name: str, segment: SharedSegment) -> NixlAgent:
    agent = NixlAgent(f"kvbus-doctor-{name}/{os.getpid()}")
    agent.register(Registration(1, segment.address, segment.size_bytes, 0, "DRAM"))
    return agent


def _say(line: bytes) -> None:
    sys.stdout.write(line.decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Be what the first argument says."""
    try:
        with SharedSegment(NUM_PLACES * READ_BYTES, name="kvbus-doctor") as segment:
            if sys.argv[1] == "target":
                serve_target(segment)
            else:
                measure(segment)
    except KVBusError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    die_with_parent()
    main()
