"""Compares the two ways to make a NIXL READ handle: one-shot, and from prepared lists.

Run it from the repository's root: ``python benchmarks/nixl_handles.py``.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvbus.transport import nixl_agent

SIZE_BYTES = 256 << 20
PEER = Path(__file__).parent / "transport_peer.py"
SHAPES = [(1, 4096), (1, 65536), (64, 65536), (2048, 4096), (2048, 16384), (1, 8 << 20)]
REPEATS = 60


def rows(base: int, starts: Any, length: int) -> Any:
    """Descriptors of one length."""
    table = np.zeros((len(starts), 3), np.uint64)
    table[:, 0] = np.uint64(base) + starts.astype(np.uint64) * np.uint64(length)
    table[:, 1] = length
    return table


def timed(make: Callable[[], Any], agent: Any) -> tuple[float, float]:
    """Median microseconds: making a handle, and the whole transfer."""
    made, whole = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        handle = make()
        made.append(time.perf_counter() - start)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        agent.release_xfer_handle(handle)
        whole.append(time.perf_counter() - start)
    return float(np.median(made)) * 1e6, float(np.median(whole)) * 1e6


def measure(agent: Any, peer: str, bases: tuple[int, int], shape: tuple[int, int]) -> None:
    """Print one row of the table."""
    num, length = shape
    slots, rng = SIZE_BYTES // length, np.random.default_rng(0)
    here, there = rng.permutation(slots)[:num], rng.permutation(slots)[:num]

    here_rows, there_rows = rows(bases[0], here, length), rows(bases[1], there, length)

    def one_shot() -> Any:
        return agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(here_rows, "DRAM"),
            agent.get_xfer_descs(there_rows, "DRAM"),
            peer,
        )

    start = time.perf_counter()
    local = agent.prep_xfer_dlist("", rows(bases[0], np.arange(slots), length), "DRAM")
    remote = agent.prep_xfer_dlist(peer, rows(bases[1], np.arange(slots), length), "DRAM")
    prepare_us = (time.perf_counter() - start) * 1e6
    indices = here.astype(np.int32), there.astype(np.int32)

    def prepared() -> Any:
        return agent.make_prepped_xfer("READ", local, indices[0], remote, indices[1])

    once, listed = timed(one_shot, agent), timed(prepared, agent)
    print(
        f"{num:>6} {length:>8} {once[0]:>10.1f} {once[1]:>10.1f} "
        f"{listed[0]:>10.1f} {listed[1]:>10.1f} {prepare_us:>10.0f}"
    )
    local.release()
    remote.release()


def main() -> None:
    """Print the table."""
    with subprocess.Popen(
        [sys.executable, str(PEER), str(SIZE_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        target = json.loads(process.stdout.readline())
        agent = nixl_agent.NixlAgent("reader/bench")._agent  # measures NIXL itself
        memory = np.zeros(SIZE_BYTES, np.uint8)
        agent.register_memory([(memory.ctypes.data, SIZE_BYTES, 0, "")], "DRAM")
        peer = agent.add_remote_agent(bytes.fromhex(target["metadata"]))
        peer = peer.decode() if isinstance(peer, bytes) else peer
        print("microseconds         one-shot              from prepared lists")
        print("  rows    bytes       make      whole       make      whole    prepare")
        for shape in SHAPES:
            measure(agent, peer, (memory.ctypes.data, target["address"]), shape)
        process.terminate()


main()
