"""Measures SGLang's handover from a prefill to a decode server: by kvbus, and by its own backends.

SGLang's routers send a request to both servers at once, and prefill answers when its KV is gone. So
a handover is from the end of the prompt's last forward pass, which prefill's answer names
(``prefill_finished_time``), to the first token that decode's client gets. It is that of prefill,
which is handed over beside the KV. All backends move the KV of a prompt after that pass.

Run it from the repository's root in the environment of ``make venv-sglang``, which has NIXL, with
6 GB of memory: ``.venv-sglang/bin/python benchmarks/sglang_handover.py``. Mooncake has a build
for machines without CUDA: ``pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1``
(Debian: ``apt-get install libibverbs1 libnuma1``); without it the others are measured. On
CPUs NIXL's and Mooncake's backends need a hook each, `handover/on_cpus`; SGLang is not patched.

The pairs of servers are up in turns, as idle ones of NIXL's and Mooncake's backends keep a core
busy. Each must first give the tokens that transformers gives.
"""

import argparse
import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from handover.block import Series
from handover.figures import IDLE, LOAD, Ratio, as_json, ratios, table
from handover.model import ModelShape, Prompts, answers, write_model
from handover.sglang import (
    BACKENDS,
    BASELINES,
    ELEMENT_BYTES,
    RESERVED_TOKENS,
    Answer,
    Pair,
    Recipe,
    starting,
)

CHECKED_PROMPTS, CHECKED_TOKENS = 4, 8
RATIOS = [
    Ratio(name, "kvbus", baseline, name, target)
    for name, target in ((IDLE, 0.7), (LOAD, 0.5))
    for baseline in BASELINES
]
PACKAGES = ("kvbus", "sglang", "nixl", "mooncake-transfer-engine-non-cuda", "torch")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--backend",
        action="append",
        choices=list(BACKENDS),
        help="measure this one; may be repeated; default: all that are installed",
    )
    parser.add_argument("--rounds", type=int, default=5, help="starts of each backend")
    parser.add_argument("--requests", type=int, default=16, help="of each phase of a turn")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time under load")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--decode-tokens", type=int, default=2, help="of an answer")
    parser.add_argument("--page-size", type=int, default=16, help="of all servers")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--heads", type=int, default=16, help="KV heads of 128, in float32")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    return parser.parse_args()


def run(options: argparse.Namespace, folder: Path) -> dict[str, list[Series]]:
    """All rounds of all backends."""
    shape = ModelShape(options.layers, options.heads, ELEMENT_BYTES)
    write_model(folder / "model", shape, max_tokens=options.tokens + RESERVED_TOKENS)
    print(f"{shape.token_bytes * options.tokens / 1e6:.1f} MB a request; logs in {folder}")
    recipe = Recipe(
        folder / "model", folder, options.page_size, options.tokens, options.concurrency
    )
    prompts = Prompts(-1).several(CHECKED_PROMPTS, options.tokens)
    right = answers(folder / "model", prompts, CHECKED_TOKENS)
    rounds: dict[str, list[Series]] = {name: [] for name in options.backend}
    order, begin_s = list(options.backend), time.monotonic()
    for number in range(options.rounds):
        for name in order:
            logs = folder / f"{number}-{name}"
            logs.mkdir()
            with starting(replace(recipe, folder=logs), name) as pair:
                pair.prefill.wait_ready()
                pair.decode.wait_ready()
                said = pair.requests(prompts, CHECKED_TOKENS, at_once=CHECKED_PROMPTS)
                if [one.tokens for one in said] != right:
                    raise SystemExit(f"error: {name} hands over wrong KV: {said}, not {right}")
                rounds[name].append(turn(options, pair, Prompts(number)))
        order = order[1:] + order[:1]  # a round begins with another backend than the last one
        print(f"round {number + 1} is done after {time.monotonic() - begin_s:.0f} s", flush=True)
    return rounds


def turn(options: argparse.Namespace, pair: Pair, prompts: Prompts) -> Series:
    """Requests one at a time, and several."""
    series: Series = {}
    for kind, at_once in (("idle", 1), ("load", options.concurrency)):
        asked = prompts.several(options.requests + at_once, options.tokens)
        said = pair.requests(asked, options.decode_tokens, at_once=at_once)
        series |= series_of(kind, said[at_once:])  # the first ones warm up
    return series


def series_of(kind: str, said: list[Answer]) -> Series:
    """Milliseconds."""
    return {
        f"{kind} handover ms": [one.handover_s * 1e3 for one in said],
        f"{kind} first token ms": [one.first_token_s * 1e3 for one in said],
    }


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    facts: dict[str, Any] = {"cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
    facts |= {"system": platform.release(), "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def main() -> None:
    """Measure, and print what came of it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by a signal"))
    options, facts = arguments(), machine()
    if options.backend is None:
        has_mooncake = find_spec("mooncake") is not None
        options.backend = [name for name in BACKENDS if has_mooncake or name != "mooncake_tcp"]
    print(*(f"{name} {fact}" for name, fact in facts.items()), sep=", ", flush=True)
    folder, kept = Path(tempfile.mkdtemp(prefix="kvh-")), True
    try:
        rounds = run(options, folder)
        kept = options.keep
    finally:
        if kept:
            print(f"\nlogs are in {folder}")
        else:
            shutil.rmtree(folder)
    print(table(rounds), *ratios(rounds, RATIOS), sep="\n")
    if options.json:
        options.json.write_text(as_json(rounds, facts) + "\n", encoding="utf-8")


main()
