"""Measures the transport against raw NIXL: small reads, large ones, the event loop's lag, CPU.

Run it from the repository's root: ``python benchmarks/transport.py``; ``UCX_TLS=tcp`` for TCP.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvbus.transport import ReadOutcome, ReadStatus, Registration, Transport, TransportLimits
from kvbus.transport.nixl_agent import NixlAgent

SIZE_BYTES = 1 << 30
PEER = Path(__file__).parent / "transport_peer.py"


def row(address: int, length: int) -> Any:
    """One descriptor."""
    return np.array([[address, length, 0]], np.uint64)


def raw_read_s(agent: NixlAgent, peer: str, local: Any, remote: Any) -> float:
    """Seconds of one READ, in one post, polled without a pause."""
    start = time.perf_counter()
    handle = agent.prepare(peer, local, remote, ("DRAM", "DRAM"))
    done = agent.post(handle, peer)
    while not done:
        done = agent.is_done(handle, peer)
    agent.release(handle)
    return time.perf_counter() - start


class Raw:
    """NIXL without the transport."""

    def __init__(self, target: dict[str, Any], memory: Any) -> None:
        self.agent = NixlAgent("raw/bench")
        self.agent.register(Registration(1, memory.ctypes.data, memory.nbytes, 0, "DRAM"))
        self.peer = self.agent.add_peer(bytes.fromhex(target["metadata"]))
        self.bases = memory.ctypes.data, target["address"]

    def read(self, length: int) -> float:
        """Seconds of one read."""
        local, remote = row(self.bases[0], length), row(self.bases[1], length)
        return raw_read_s(self.agent, self.peer, local, remote)


class Bench:
    """A transport on an event loop."""

    def __init__(self, target: dict[str, Any], memory: Any) -> None:
        self.loop = asyncio.get_running_loop()
        limits = TransportLimits(slice_bytes=int(os.environ.get("SLICE_BYTES", str(8 << 20))))
        self.transport = Transport(
            "loop/bench", limits=limits, deliver=self.loop.call_soon_threadsafe
        )
        self.target, self.memory = target, memory

    async def connect(self) -> None:
        await asyncio.wrap_future(self.transport.start())
        await asyncio.wrap_future(
            self.transport.register(self.memory.ctypes.data, self.memory.nbytes)
        )
        metadata = bytes.fromhex(self.target["metadata"])
        self.peer = await asyncio.wrap_future(self.transport.add_peer(metadata))

    async def read(self, length: int, offset: int = 0) -> float:
        """Seconds of one read, as a service sees it."""
        ended: asyncio.Future[ReadOutcome] = self.loop.create_future()
        start = time.perf_counter()
        self.transport.read(
            self.peer,
            row(self.memory.ctypes.data + offset, length),
            row(self.target["address"] + offset, length),
            on_end=ended.set_result,
        )
        outcome = await ended
        assert outcome.status is ReadStatus.DONE, outcome
        return time.perf_counter() - start

    async def lag_during(self, work: Any) -> list[float]:
        """How late 1 ms timers are while something else is done."""
        task, lags = asyncio.ensure_future(work), []
        while not task.done():
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - due)
        await task
        return lags


def report(name: str, times: list[float]) -> None:
    """Print percentiles in microseconds."""
    p50, p99 = np.percentile(times, [50, 99]) * 1e6
    print(f"{name:<44} p50 {p50:9.1f} us   p99 {p99:9.1f} us   n {len(times)}")


async def measure(target: dict[str, Any], memory: Any, raw: Raw) -> None:
    """All measurements on one loop."""
    bench = Bench(target, memory)
    await bench.connect()
    for name, length, repeats in (("4 KiB", 4096, 1000), ("64 MiB", 64 << 20, 40)):
        pairs = [(raw.read(length), await bench.read(length)) for _ in range(repeats)][5:]
        alone, ours = (float(np.median(times)) for times in zip(*pairs, strict=True))
        report(f"{name} read, in turn with raw NIXL", [pair[1] for pair in pairs])
        print(
            f"    raw {alone * 1e6:.1f} us, ours {(ours - alone) * 1e6:+.1f} us, "
            f"{length / alone / 1e9:.2f} and {length / ours / 1e9:.2f} GB/s: {alone / ours:.3f}"
        )
    report("event loop lag, idle", await bench.lag_during(asyncio.sleep(1)))
    for _ in range(2):
        report("event loop lag, 1 GiB in flight", await bench.lag_during(bench.read(SIZE_BYTES)))
    big = asyncio.ensure_future(bench.read(SIZE_BYTES))
    beside = []
    while not big.done():
        beside.append(await bench.read(4096, SIZE_BYTES - 4096))
        await asyncio.sleep(0.001)
    report("4 KiB read beside 1 GiB", beside)
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(100):
        await asyncio.gather(*(bench.read(65536, 65536 * n) for n in range(20)))
    wall = time.perf_counter() - start
    print(
        f"{'64 KiB reads, 20 at a time':<44} {2000 / wall:.0f} reads/s, "
        f"{(time.process_time() - cpu) / 2000 * 1e6:.0f} us CPU each"
    )
    for name, demands in (("idle", 0), ("demanded", 1)):
        held = [bench.transport.hold_progress() for _ in range(demands)]
        cpu = time.process_time()
        await asyncio.sleep(2)
        print(f"{'CPU ' + name:<44} {(time.process_time() - cpu) / 2 * 100:.2f} % of a core")
        for demand in held:
            demand.close()
    print(await asyncio.wrap_future(bench.transport.close(timeout_s=5)))


def main() -> None:
    """Start the target, measure, end it."""
    with subprocess.Popen(
        [sys.executable, str(PEER), str(SIZE_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        target = json.loads(process.stdout.readline())
        memory = np.ones(SIZE_BYTES, np.uint8)
        asyncio.run(measure(target, memory, Raw(target, memory)))
        process.terminate()


main()
