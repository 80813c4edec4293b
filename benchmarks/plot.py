"""Draws the README's chart from ``benchmarks/results``.

Run it from the repository's root: ``python benchmarks/plot.py``. A missing file of
results is reported with the command that makes it, and its bars are left out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from handover.figures import IDLE, pooled

from kvbus.bench.machine import head
from kvbus.bench.plot import Panel, check_plot, draw
from kvbus.bench.sheet import label
from kvbus.errors import KVBusError

SOURCES = {
    "sglang.json": ".venv-sglang/bin/python benchmarks/sglang_handover.py --json {}",
    "vllm.json": ".venv-vllm/bin/python benchmarks/vllm_handover.py --json {}",
    "bench.json": "kvbus bench --json | tail -n 1 > {}",
}
BENCH = "bench.json"
SGLANG = {"kvbus": "kvbus", "nixl": "NIXL", "mooncake_tcp": "Mooncake"}
VLLM = {"kvbus": "kvbus", "nixl-tuned": "NixlConnector"}
BYTES_CASE = "scattered-256k"
BYTES = ("kvbus", "unmapped", "raw READ", "memcpy")
THEMES = ("light", "dark")
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


def panels(found: dict[str, Any]) -> Sequence[Panel]:
    handoffs = {"sglang.json": ("SGLang handoff", SGLANG), "vllm.json": ("vLLM handoff", VLLM)}
    drawn = [
        _handoffs(title, found[one], of) for one, (title, of) in handoffs.items() if one in found
    ]
    return (*drawn, _bytes(found[BENCH]))


def caption(found: dict[str, Any]) -> str:
    versions = {
        name: one["machine"][name]
        for one in found.values()
        for name in VERSIONS
        if name in one["machine"]
    }
    facts = found[BENCH]["machine"]
    return ", ".join([head(facts), *(f"{name} {text}" for name, text in versions.items())])


def _handoffs(title: str, found: dict[str, Any], names: dict[str, str]) -> Panel:
    medians = {name: pooled(found["rounds"], name, IDLE) for name in names}
    bars = [(names[one], statistics.median(some)) for one, some in medians.items() if some]
    return Panel(title, "ms", bars)


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
            path = options.into / f"performance-{theme}.svg"
            check_plot(path)
            draw(panels(found), path, theme=theme, columns=len(found), caption=caption(found))
    except KVBusError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
