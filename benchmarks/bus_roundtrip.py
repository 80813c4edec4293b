"""Round trips between two processes over the bus: latency, and CPU time for each message.

    python benchmarks/bus_roundtrip.py [--requests 20000] [--concurrency 1 64]

CPU time is of the whole process, ZeroMQ's I/O thread included ("all"), and of the event loop's
thread alone ("loop"). A round trip is two messages on each side: one received, one sent.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import anyio

from kvbus.bus import Call, RequestClient, RequestServer, new_boot_id, new_context
from kvbus.errors import KVBusError
from kvbus.protocol.message import Message, Request


class Lent(Message, frozen=True):
    """Reply to `Borrow`."""

    lease: int


class Borrow(Request[Lent], frozen=True):
    """As large as a claim."""

    op: ClassVar[str] = "borrow"

    offer: str = "b7c1f2d0a9"
    blocks: bytes = bytes(256)
    tokens: int = 4096
    lease_s: float = 10.0


class CpuTimes(Message, frozen=True):
    """Reply to `TellCpu`."""

    process_s: float
    thread_s: float


class TellCpu(Request[CpuTimes], frozen=True):
    """Asks for the server's CPU time so far."""

    op: ClassVar[str] = "cpu"


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of this process and of this thread."""

    process_s: float
    thread_s: float

    @staticmethod
    def now() -> "Cpu":
        return Cpu(time.process_time(), time.thread_time())

    def per_message_us(self, since: "Cpu", num_requests: int) -> str:
        scale = 1e6 / (2 * num_requests)
        process_us = (self.process_s - since.process_s) * scale
        thread_us = (self.thread_s - since.thread_s) * scale
        return f"{process_us:5.1f} all {thread_us:5.1f} loop"


def serve(endpoint: str, bound: Any) -> None:
    """Answer until terminated."""

    def tell_cpu(_: TellCpu, call: Call) -> None:
        cpu = Cpu.now()
        call.reply(CpuTimes(process_s=cpu.process_s, thread_s=cpu.thread_s))

    def lend(_: Borrow, call: Call) -> None:
        call.reply(Lent(lease=7))

    async def main() -> None:
        with new_context() as context:
            server = RequestServer(context, endpoint, boot=new_boot_id())
            server.on({TellCpu: tell_cpu, Borrow: lend})
            bound.send(server.endpoint)
            await server.run()

    anyio.run(main)


class Load:
    """Keeps ``concurrency`` requests under way until ``num_requests`` were answered."""

    def __init__(self, client: RequestClient, num_requests: int, concurrency: int) -> None:
        self.client, self.num_requests, self.concurrency = client, num_requests, concurrency
        self.latencies_s: list[float] = []
        self.num_sent = 0
        self.done = anyio.Event()

    def send(self) -> None:
        if self.num_sent == self.num_requests:
            return
        self.num_sent += 1
        self.client.send(Borrow(), timeout_s=30, on_reply=self.on_reply(time.perf_counter()))

    def on_reply(self, sent_at: float) -> Callable[[Lent | KVBusError], None]:
        def record(outcome: Lent | KVBusError) -> None:
            if isinstance(outcome, KVBusError):
                raise outcome
            self.latencies_s.append(time.perf_counter() - sent_at)
            self.send()
            if len(self.latencies_s) == self.num_requests:
                self.done.set()

        return record

    async def run(self) -> None:
        for _ in range(self.concurrency):
            self.send()
        await self.done.wait()


async def served_cpu(client: RequestClient) -> Cpu:
    reply = await client.ask(TellCpu(), timeout_s=5)
    return Cpu(reply.process_s, reply.thread_s)


async def measure(client: RequestClient, name: str, num_requests: int, concurrency: int) -> None:
    await Load(client, 500, concurrency).run()
    load = Load(client, num_requests, concurrency)
    theirs, ours, start_s = await served_cpu(client), Cpu.now(), time.perf_counter()
    await load.run()
    elapsed_s = time.perf_counter() - start_s
    ours_us = Cpu.now().per_message_us(ours, num_requests)
    theirs_us = (await served_cpu(client)).per_message_us(theirs, num_requests)
    ordered = sorted(load.latencies_s)
    p50_us, p99_us = (ordered[int(len(ordered) * q)] * 1e6 for q in (0.5, 0.99))
    print(
        f"{name:4} x{concurrency:<3} p50 {p50_us:7.0f} us  p99 {p99_us:7.0f} us  "
        f"{num_requests / elapsed_s:7.0f}/s  CPU us/message: client {ours_us}, server {theirs_us}"
    )


async def bench(endpoint: str, name: str, arguments: argparse.Namespace) -> None:
    with new_context() as context:
        client = RequestClient(context, endpoint, boot=new_boot_id())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            for concurrency in arguments.concurrency:
                await measure(client, name, arguments.requests, concurrency)
            tasks.cancel_scope.cancel()


def main() -> None:
    """Measure ipc, then tcp."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64])
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for name, endpoint in (
            ("ipc", f"ipc://{Path(folder) / 'bus'}"),
            ("tcp", "tcp://127.0.0.1:*"),
        ):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(endpoint, theirs))
            process.start()
            anyio.run(bench, ours.recv(), name, arguments)
            process.terminate()
            process.join()


if __name__ == "__main__":
    main()
