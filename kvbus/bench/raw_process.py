"""One of the two bare processes of the baseline: NIXL, a memory file, and nothing else.

Refuses to schedule: the reader posts all descriptors at once and spins until they are done.

    raw_process target SIZE            prints where its memory is; then 'd' drives, 'r' rests
    raw_process reader SIZE ROWS.npz   takes that line; then 'read' or 'verify', a line each
"""

import os
import select
import sys
import time

import msgspec
import numpy as np

from kvbus.bench.words import WORD_BYTES, fill, words_at
from kvbus.memory.segment import SharedSegment
from kvbus.transport import Registration, TransportLimits
from kvbus.transport.nixl_agent import NixlAgent
from kvbus.transport.slicing import Rows


class Where(msgspec.Struct, frozen=True):
    """What a reader needs of its target."""

    address: int
    metadata: bytes


def serve_target(segment: SharedSegment) -> None:
    """Fill the memory, say where it is, and drive progress as often as an agent does."""
    agent = _agent("bench-target", segment)
    fill(segment.view().view(np.uint64))
    _say(msgspec.json.encode(Where(segment.address, agent.metadata(None))).decode())
    driving, poll_s = False, TransportLimits().poll_s
    while True:
        if select.select([sys.stdin.fileno()], [], [], poll_s if driving else None)[0]:
            command = os.read(sys.stdin.fileno(), 1)
            if not command:
                return
            driving = command == b"d"
        agent.progress()


def serve_reader(segment: SharedSegment, rows_path: str) -> None:
    """Read when told to, and say how many seconds it took."""
    where = msgspec.json.decode(sys.stdin.readline(), type=Where)
    agent = _agent("bench-reader", segment)
    peer = agent.add_peer(where.metadata)
    with np.load(rows_path) as rows:
        local, remote = rows["local"], rows["remote"]
    here, there = _based(local, segment.address), _based(remote, where.address)
    for command in sys.stdin:
        segment_wiped = command.strip() == "verify"
        if segment_wiped:
            segment.view()[:] = 0
        seconds = _read_s(agent, peer, here, there)
        if segment_wiped and not _arrived(segment, local, remote):
            sys.exit("the raw read brought wrong bytes")
        _say(f"{seconds:.9f}")


def _agent(name: str, segment: SharedSegment) -> NixlAgent:
    agent = NixlAgent(f"{name}/{os.getpid()}")
    agent.register(Registration(1, segment.address, segment.size_bytes, 0, "DRAM"))
    return agent


def _read_s(agent: NixlAgent, peer: str, local: Rows, remote: Rows) -> float:
    began = time.perf_counter()
    handle = agent.prepare(peer, local, remote, ("DRAM", "DRAM"))
    done = agent.post(handle, peer)
    while not done:
        done = agent.is_done(handle, peer)
    agent.release(handle)
    return time.perf_counter() - began


def _based(offsets: Rows, address: int) -> Rows:
    rows = offsets.copy()
    rows[:, 0] += np.uint64(address)
    return rows


def _arrived(segment: SharedSegment, local: Rows, remote: Rows) -> bool:
    words = segment.view().view(np.uint64)
    return all(
        bool((words[to : to + num] == words_at(np.arange(start, start + num))).all())
        for to, start, num in zip(
            local[:, 0] // WORD_BYTES,
            remote[:, 0] // WORD_BYTES,
            local[:, 1] // WORD_BYTES,
            strict=True,
        )
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Be what the first argument says."""
    role, size_bytes, *rest = sys.argv[1:]
    with SharedSegment(int(size_bytes), name=f"bench-{role}") as segment:
        if role == "target":
            serve_target(segment)
        else:
            serve_reader(segment, *rest)


if __name__ == "__main__":
    main()
