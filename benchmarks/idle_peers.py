"""Measures what an idle decode agent with many peers costs: CPU time, by number of peers.

Run it from the repository's root: ``python benchmarks/idle_peers.py``. Each prefill agent has an
engine, from which the decode engine fetches one block; then nothing happens for a while. A prefill
agent takes some 80 MB.
"""

import argparse
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import anyio

from kvbus.bench.caches import open_caches
from kvbus.bench.prefill_engine import SourceEngine
from kvbus.bench.processes import agent
from kvbus.bench.shapes import GROUP, SMALL
from kvbus.engine import DecodeSession

ATTACH_TIMEOUT_S, CALM_S = 300.0, 3.0


async def measure(num_peers: int, seconds: float, folder: Path) -> None:
    """Start all of it, fetch once from each peer, and print the agents' CPU time after that."""
    with ExitStack() as agents:
        decode = agents.enter_context(agent("decode", folder))
        prefill = [
            agents.enter_context(agent("prefill", folder, label=str(number)))
            for number in range(num_peers)
        ]
        async with anyio.create_task_group() as tasks, AsyncExitStack() as engines:
            spec = SMALL.spec("reader")
            session = DecodeSession(decode.attach_path, spec, attach_timeout_s=ATTACH_TIMEOUT_S)
            await engines.enter_async_context(session)
            await open_caches(engines, decode.attach_path, spec, SMALL, 2)
            await session.register()
            await session.ready()
            for number, peer in enumerate(prefill):
                source = SourceEngine(tasks, str(peer.attach_path), f"source-{number}")
                engines.push_async_callback(source.close)
                await source.open(SMALL.name, 2)
                (ticket,) = await source.offer([(f"request-{number}", SMALL.block_size, [1])])
                fetch = session.fetch(ticket, num_tokens=SMALL.block_size, block_ids={GROUP: [1]})
                await fetch.ended
            await anyio.sleep(CALM_S)
            everybody = {"decode agent": decode, "a prefill agent": prefill[0]}
            before = {name: one.child.cpu_s() for name, one in everybody.items()}
            await anyio.sleep(seconds)
            for name, one in everybody.items():
                share = (one.child.cpu_s() - before[name]) / seconds * 100
                print(f"{name}: {share:.2f} % of a core, {num_peers} peers, {seconds:g} s")
            tasks.cancel_scope.cancel()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--peers", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        anyio.run(measure, options.peers, options.seconds, Path(folder))


main()
