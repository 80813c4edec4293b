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

from kvbus.bench.engine import DecodeEngine, PrefillEngine
from kvbus.bench.processes import agent
from kvbus.bench.shapes import SMALL, contiguous

PATIENCE_S, CALM_S = 300.0, 3.0


async def measure(num_peers: int, seconds: float, folder: Path) -> None:
    """Start all of it, fetch once from each peer, and print the agents' CPU time after that."""
    with ExitStack() as agents:
        decode = agents.enter_context(agent("decode", folder))
        prefill = [
            agents.enter_context(agent("prefill", folder, label=str(number)))
            for number in range(num_peers)
        ]
        async with AsyncExitStack() as engines:
            reader = DecodeEngine(
                decode.attach_path, "reader", SMALL, 2, attach_timeout_s=PATIENCE_S
            )
            await engines.enter_async_context(reader)
            block = contiguous(1)
            for number, peer in enumerate(prefill):
                source = PrefillEngine(
                    peer.attach_path, f"source-{number}", SMALL, 2, attach_timeout_s=PATIENCE_S
                )
                await engines.enter_async_context(source)
                request = f"request-{number}", block.num_tokens, block.prefill.tolist()
                (ticket,) = await source.run(source.offer([request]))
                await reader.fetch(ticket, block)
            await anyio.sleep(CALM_S)
            everybody = {"decode agent": decode, "a prefill agent": prefill[0]}
            before = {name: one.child.cpu_s() for name, one in everybody.items()}
            await anyio.sleep(seconds)
            for name, one in everybody.items():
                share = (one.child.cpu_s() - before[name]) / seconds * 100
                print(f"{name}: {share:.2f} % of a core, {num_peers} peers, {seconds:g} s")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--peers", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        anyio.run(measure, options.peers, options.seconds, Path(folder))


main()
