"""Draws the charts of the README and of the benchmarks page from ``benchmarks/results``.

Run it from the repository's root: ``python benchmarks/plot.py``. A missing file of
results is reported with the command that makes it, and its bars are left out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from handover.figures import IDLE, LOAD, pooled

from kvbus.bench.machine import head
from kvbus.bench.plot import Panel, check_plot, draw
from kvbus.bench.plot import panels as bench_panels
from kvbus.bench.sheet import label
from kvbus.errors import KVBusError

SOURCES = {
    "sglang.json": ".venv-sglang/bin/python benchmarks/sglang_handover.py --rounds 1 --requests 12"
    " --json {}",
    "vllm.json": ".venv-vllm/bin/python benchmarks/vllm_handover.py --rounds 1 --requests 12"
    " --connector kvbus --connector nixl-tuned --json {}",
    "bench.json": "kvbus bench --json | tail -n 1 > {}",
    "trust-mapped.json": "python benchmarks/trust.py --json {}",
    "trust-unmapped.json": "python benchmarks/trust.py --unmapped --json {}",
}
BENCH = "bench.json"
SGLANG = {"kvbus": "kvbus", "nixl": "NIXL", "mooncake_tcp": "Mooncake"}
VLLM = {"kvbus": "kvbus", "nixl-tuned": "NixlConnector"}
BYTES_CASE = "scattered-256k"
BYTES_CASES = ("contiguous-64m", BYTES_CASE, "scattered-16k")
BYTES = ("kvbus", "unmapped", "raw READ", "memcpy")
ONE_BLOCK = ("handoff p", "floor p", "one-block handoff p")
THEMES = ("light", "dark")
OPTIONS = {
    "plain": "kvbus",
    "keys": "keys",
    "signed": "keys, signed tickets",
    "staging": "exposure = staging",
    "sampled": "digest = sampled",
    "full": "digest = full",
}
IDLE_SERVERS = ("prefill server", "decode server", "agents")
VERSIONS = ("sglang", "vllm", "mooncake-transfer-engine-non-cuda")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--into", type=Path, default=Path("docs/pictures"))
    return parser.parse_args()


def read(folder: Path) -> dict[str, Any]:
    """Return what there is. Exit without `kvbus bench`, whose machine the caption names."""
    found = {}
    for name, command in SOURCES.items():
        path = folder / name
        if path.is_file():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
        else:
            print(f"{path} is missing: {command.format(path)}", file=sys.stderr)
    if BENCH not in found:
        sys.exit(f"error: nothing is drawn without {folder / BENCH}")
    return found


def chart_of_readme(found: dict[str, Any]) -> Sequence[Panel]:
    return (*_handoffs(found, IDLE, ""), _bytes(found[BENCH]))


def charts(found: dict[str, Any]) -> dict[str, Sequence[Panel]]:
    """Return one chart for each question of the benchmarks page; without its results, none."""
    rows = found[BENCH]["figures"]
    alone, at_once = ", one at a time", ", 8 at a time"
    return {
        "handoffs": [*_handoffs(found, IDLE, alone), *_handoffs(found, LOAD, at_once)],
        "bytes": bench_panels([row for row in rows if _is_of_bytes(row)]),
        "block": bench_panels([row for row in rows if _is_of_one_block(row)]),
        "cpu": [*bench_panels([row for row in rows if row["unit"] == "us each"]), *_idle(found)],
        "options": [
            Panel(f"64 MiB, {way}", "ms", [(OPTIONS[name], value) for name, value in of.items()])
            for way in ("mapped", "unmapped")
            if (of := found.get(f"trust-{way}.json", {}).get("64 MiB"))
        ],
    }


def caption(found: dict[str, Any]) -> str:
    versions = {
        name: one["machine"][name]
        for one in found.values()
        for name in VERSIONS
        if name in one.get("machine", ())
    }
    facts = found[BENCH]["machine"]
    return ", ".join([head(facts), *(f"{name} {text}" for name, text in versions.items())])


def _handoffs(found: dict[str, Any], series: str, case: str) -> Iterator[Panel]:
    for file, engine, names in (("sglang.json", "SGLang", SGLANG), ("vllm.json", "vLLM", VLLM)):
        rounds = found.get(file, {}).get("rounds", {})
        medians = {name: pooled(rounds, name, series) for name in names}
        if any(medians.values()):
            bars = [(names[one], statistics.median(some)) for one, some in medians.items() if some]
            yield Panel(f"{engine} handoff{case}", "ms", bars)


def _is_of_bytes(row: dict[str, Any]) -> bool:
    return row["case"] in BYTES_CASES and row["unit"] == "GB/s"


def _is_of_one_block(row: dict[str, Any]) -> bool:
    return row["case"] in ("fixed", "load") and row["name"].startswith(ONE_BLOCK)


def _idle(found: dict[str, Any]) -> Iterator[Panel]:
    rounds = found.get("vllm.json", {}).get("rounds", {})
    series = [f"nothing to do, CPU %, {who}" for who in IDLE_SERVERS]
    bars = [
        (name, sum(statistics.median(pooled(rounds, one, each)) for each in series))
        for one, name in VLLM.items()
        if all(pooled(rounds, one, each) for each in series)
    ]
    if bars:
        yield Panel("two idle vLLM servers, with agents", "% of a core", bars)


def _bytes(found: dict[str, Any]) -> Panel:
    speeds = {
        row["name"]: row["value"]
        for row in found["figures"]
        if row["case"] == BYTES_CASE and row["unit"] == "GB/s"
    }
    return Panel("64 MiB on one host", "GB/s", [(label(name), speeds[name]) for name in BYTES])


def main() -> None:
    options = arguments()
    found = read(options.results)
    try:
        for theme in THEMES:
            shown = chart_of_readme(found)
            path = options.into / f"performance-{theme}.svg"
            check_plot(path)
            draw(shown, path, theme=theme, columns=len(shown), caption=caption(found))
        for name, shown in charts(found).items():
            if shown:
                draw(
                    shown,
                    options.into / f"benchmarks-{name}.svg",
                    columns=3 if name == "bytes" else 2,
                )
    except KVBusError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
