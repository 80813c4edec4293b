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

from kvbus.bench.bench_engine import SMALL, BenchEngine, contiguous
from kvbus.bench.pairs import BenchAgent, agent
from kvbus.engine import AgentRole

ATTACH_TIMEOUT_S, CALM_S = 300.0, 3.0


def engine(agent: BenchAgent, name: str, role: AgentRole) -> BenchEngine:
    """One of few blocks, which waits long for its agent."""
    return BenchEngine(
        agent.attach_path, name, SMALL, 2, role=role, attach_timeout_s=ATTACH_TIMEOUT_S
    )


async def measure(num_peers: int, seconds: float, folder: Path) -> None:
    """Start all of it, fetch once from each peer, and print the agents' CPU time after that."""
    with ExitStack() as agents:
        decode = agents.enter_context(agent("decode", folder))
        prefill = [
            agents.enter_context(agent("prefill", folder, label=str(number)))
            for number in range(num_peers)
        ]
        async with AsyncExitStack() as engines:
            reader = await engines.enter_async_context(engine(decode, "reader", AgentRole.DECODE))
            block = contiguous(1)
            for number, peer in enumerate(prefill):
                source = engine(peer, f"source-{number}", AgentRole.PREFILL)
                await engines.enter_async_context(source)
                request = f"request-{number}", block.num_tokens, block.prefill.tolist()
                (ticket,) = await source.offer_all([request])
                await reader.fetch_timed(ticket, block)
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
