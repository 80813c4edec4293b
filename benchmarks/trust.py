"""Measures what keys, signed tickets, digests and ``exposure = "staging"`` cost.

Run it from the repository's root: ``python benchmarks/trust.py``, with ``--unmapped`` for reads by
NIXL. Each setting has its own prefill agent, decode agent and engines, which are idle while the
others take their turns. It prints medians, and their ratio to those of the plain setting; a busy
machine changes the medians more than the ratio.
"""

import argparse
import base64
import json
import secrets
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from kvbus.bench.bench_engine import BIG, SMALL, PairedBlocks, Shape, scattered
from kvbus.bench.cases import measure_rate
from kvbus.bench.figures import Scale, in_turn
from kvbus.bench.pairs import Bench, Pair, running
from kvbus.bus import new_key_pair
from kvbus.keys.files import write_secret
from kvbus.keys.trusted import TrustedKey, write_trusted
from kvbus.protocol.message import Role

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
WAYS = ("plain", "keys", "signed", "staging", "sampled", "full")
RATE_ROUNDS = 5
SIZES: dict[str, tuple[Shape, int, int]] = {
    "64 KiB": (SMALL, 1, 20),
    "4 MiB": (BIG, 16, 4),
    "64 MiB": (BIG, 256, 1),
}
"""Shape, number of blocks, handoffs for each round."""


def settings(way: str, folder: Path, *, mapped: bool) -> dict[str, dict[str, Any]]:
    """Return the settings of both agents, by role; signed tickets have keys as well."""
    more: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {}}
    if way in ("sampled", "full"):
        more["decode"]["digest"] = way
    if way == "staging":
        more["prefill"]["exposure"] = "staging"
    if way in ("keys", "signed"):
        more = {name: keyed(folder, name, role) for name, role in ROLES.items()}
    if way == "signed":
        (folder / "ticket.key").touch(mode=0o600)
        (folder / "ticket.key").write_bytes(base64.b64encode(secrets.token_bytes(32)))
        more = {
            role: {**one, "ticket_keys": [str(folder / "ticket.key")]} for role, one in more.items()
        }
    more["decode"]["mapped"] = mapped
    return more


def keyed(folder: Path, name: str, role: Role) -> dict[str, Any]:
    """Return the keys of a configuration: a new key, and trust in all of ``folder``."""
    pair, trusted = new_key_pair(), folder / "trusted"
    write_secret(folder / f"{name}.key", pair)
    write_trusted(trusted, TrustedKey(name, pair.public, frozenset({role})))
    return {"key_file": str(folder / f"{name}.key"), "authorized_keys": str(trusted)}


async def measure(
    sites: dict[str, Bench], shape: Shape, tables: PairedBlocks, rounds: int
) -> dict[str, list[float]]:
    """Seconds of the fetches, by way."""
    async with AsyncExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for way, bench in sites.items():
            await stack.enter_async_context(bench.opened)
            pairs[way] = await bench.pair(shape, tables.capacities[0])
            await pairs[way].verify(tables)
        ways = {way: lambda pair=pair: pair.timed(tables) for way, pair in pairs.items()}
        return await in_turn(range(rounds), ways)


async def main(rounds: int, folder: Path, mapped: bool) -> dict[str, dict[str, float]]:
    """Print a line for each size, and one for the rate; return the medians."""
    medians = {}
    async with AsyncExitStack() as stack:
        sites = {}
        for way in WAYS:
            (folder / way).mkdir(mode=0o700)
            bench = running(folder / way, settings(way, folder / way, mapped=mapped))
            sites[way] = await stack.enter_async_context(bench)
        for name, (shape, num_blocks, times) in SIZES.items():
            seconds = await measure(sites, shape, scattered(num_blocks, shape), rounds * times)
            medians[name] = {way: 1e3 * median(seconds[way]) for way in WAYS}
            tell(name, medians[name], "ms")
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(RATE_ROUNDS):
            for way, bench in sites.items():
                async with bench.opened:
                    rate, *_ = await measure_rate(bench, Scale(factor=0.3))
                rates[way].append(rate.value)
        medians["rate"] = {way: median(rates[way]) for way in WAYS}
        tell("rate", medians["rate"], "1/s")
    return medians


def tell(name: str, figures: dict[str, float], unit: str) -> None:
    """A line with the figures, and the ratio of each to the first."""
    plain = figures["plain"]
    shown = (f"{way} {value:.2f} {unit} ({value / plain:.2f})" for way, value in figures.items())
    print(f"{name:>7}: {', '.join(shown)}", flush=True)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--unmapped", action="store_true", help="read by NIXL, as between machines")
parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians there")
options = parser.parse_args()
with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as name:
    found = anyio.run(main, options.rounds, Path(name), not options.unmapped)
if options.json:
    options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
