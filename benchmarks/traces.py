"""Measures what spans for a collector cost, and what a trace leaves out.

Run it from the repository's root: ``python benchmarks/traces.py``. Two deployments run side
by side, of which one sends all of its spans to a collector; they are measured in turns. The
collector is a process that reads requests and throws them away.
"""

import argparse
import http.client
import json
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import anyio

from kvbus.agent.spans import SENDING
from kvbus.bench.bench_engine import BIG, scattered
from kvbus.bench.cases import measure_rate
from kvbus.bench.figures import Scale, in_turn
from kvbus.bench.pairs import Bench, Pair, running
from kvbus.spawn import free_port

MIB = 1 << 20
SIZES_MIB = (1, 16, 64)
OFF, ON = "without", "with spans"
WAYS = (SENDING,)
ACKNOWLEDGED_S = 0.1
"""More than an engine takes to say when it was told of the last end."""


def swallow(port: int) -> None:
    """A collector that keeps nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server looks for
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


@asynccontextmanager
async def deployments(folder: Path) -> AsyncIterator[dict[str, Bench]]:
    """One of each kind, and the collector."""
    port = free_port()
    collector = get_context("spawn").Process(target=swallow, args=(port,), daemon=True)
    collector.start()
    async with AsyncExitStack() as stack:
        stack.callback(collector.terminate)
        collected = {"otlp_endpoint": f"http://127.0.0.1:{port}"}
        benches = {}
        for name, label, settings in ((OFF, "off", {}), (ON, "on", collected)):
            (folder / label).mkdir(mode=0o700)
            bench = running(folder / label, {"prefill": settings, "decode": settings})
            benches[name] = await stack.enter_async_context(bench)
        yield benches


@asynccontextmanager
async def pairs(benches: dict[str, Bench], num_blocks: int) -> AsyncIterator[dict[str, Pair]]:
    """Engines at each deployment."""
    async with AsyncExitStack() as stack:
        for bench in benches.values():
            await stack.enter_async_context(bench.opened)
        yield {name: await bench.pair(BIG, num_blocks) for name, bench in benches.items()}


async def compare_rates(benches: dict[str, Bench], rounds: int, factor: float) -> None:
    """One-block handoffs, 64 at a time, and the CPU time that each takes in all processes."""
    rates: dict[str, list[float]] = {name: [] for name in benches}
    cpu_us: dict[str, list[float]] = {name: [] for name in benches}
    for number in range(rounds):
        for name in (OFF, ON) if number % 2 else (ON, OFF):
            async with benches[name].opened:
                rate, *more = await measure_rate(benches[name], Scale(factor=factor))
            rates[name].append(rate.value)
            cpu_us[name].append(sum(one.value for one in more if one.name.endswith("CPU")))
    ratio = median_ratio(rates[ON], rates[OFF])
    told = ", ".join(f"{name} {median(some):.0f}/s" for name, some in rates.items())
    print(f"one block, 64 at a time: {ratio:.4f} of the rate by round; {told}")
    ratio = median_ratio(cpu_us[ON], cpu_us[OFF])
    told = ", ".join(f"{name} {median(some):.0f} µs" for name, some in cpu_us.items())
    print(f"  {ratio:.4f} of the CPU time of a handoff by round; {told}")


async def compare_times(benches: dict[str, Bench], rounds: int, num_mib: int) -> None:
    """Handoffs of a size, one at a time, and what of each the spans of its stages cover."""
    tables = scattered(num_mib * MIB // BIG.block_bytes, BIG)
    async with pairs(benches, tables.capacities[0]) as made:
        for pair in made.values():
            await pair.verify(tables)
        ways: dict[str, Callable[[], Awaitable[float]]] = {
            name: partial(pair.timed, tables) for name, pair in made.items()
        }
        times = await in_turn(range(rounds), ways)
        ratio = median_ratio(times[OFF], times[ON])
        took = ", ".join(f"{name} {median(some) * 1e3:.2f} ms" for name, some in times.items())
        print(f"{num_mib} MiB: {ratio:.4f} of the speed by round; {took}", flush=True)
        port = benches[OFF].agents["decode agent"].metrics_port
        await anyio.sleep(ACKNOWLEDGED_S)
        fetches = made[OFF].fetches[-50:]
        spans = [spans_s(port, one.fetched.fetch_id) for one in fetches]
        for what, left_out in (("", ()), (" without the way to the agent", WAYS)):
            sums = [sum(s for name, s in some.items() if name not in left_out) for some in spans]
            shares = sorted(s / one.seconds for s, one in zip(sums, fetches, strict=True))
            told = f"{median(shares):.1%} ({shares[0]:.1%} to {shares[-1]:.1%})"
            print(f"  spans{what} cover {told} of what the engine measures", flush=True)


def median_ratio(baseline_s: Sequence[float], ours_s: Sequence[float]) -> float:
    """Our speed beside the baseline's, the median over rounds: what hits both cancels out."""
    pairs = zip(baseline_s, ours_s, strict=True)
    return median(baseline / ours for baseline, ours in pairs)


def spans_s(port: int, fetch_id: str) -> dict[str, float]:
    """The seconds of the spans of a fetch, as its agent tells them, by name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", f"/trace?id={fetch_id}")
    spans = json.loads(connection.getresponse().read())["spans"]
    connection.close()
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span["depth"] == 1:
            seconds[span["name"]] += span["end_s"] - span["start_s"]
    return seconds


async def measure(rounds: int, seconds: float, folder: Path, only_rate: bool) -> None:
    """All of it."""
    async with deployments(folder) as benches:
        await compare_rates(benches, rounds, seconds / 10.0)
        for num_mib in () if only_rate else SIZES_MIB:
            await compare_times(benches, 10 * rounds, num_mib)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only-rate", action="store_true", help="no handoffs of a size")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of a rate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        anyio.run(measure, options.rounds, options.seconds, Path(folder), options.only_rate)


if __name__ == "__main__":
    main()
