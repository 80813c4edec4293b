"""`kvbus bench --plot` and the README's chart: what cannot be drawn is refused at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbus.bench.plot import Panel, check_plot, draw, panels
from kvbus.errors import ConfigError

ROOT = Path(__file__).parents[3]
BARS = [("kvbus", 14.0), ("NIXL", 34.0)]
ROWS = [
    {"case": case, "name": name, "value": value, "unit": unit}
    for case, name, value, unit in (
        ("scattered-256k", "kvbus vs raw READ", 1.5, "x"),
        ("scattered-256k", "kvbus", 5.4, "GB/s"),
        ("scattered-256k", "raw READ", 3.6, "GB/s"),
        ("scattered-256k", "unmapped", 3.0, "GB/s"),
        ("scattered-256k", "memcpy", 6.0, "GB/s"),
        ("scattered-256k", "kvbus p50", 12.4, "ms"),
        ("scattered-256k", "  reading p50", 12.0, "ms"),
        ("fixed", "handoff p50", 0.5, "ms"),
        ("fixed", "offer to released p50", 0.7, "ms"),
    )
]
MACHINE = {"cpu": "a CPU", "cpus": 2, "memory_bytes": 8 << 30, "load_before": 0.5} | dict.fromkeys(
    ("kernel", "python", "kvbus", "nixl", "pyzmq"), "1.2"
)


def handover(**values: float) -> dict[str, Any]:
    """Return results of a handover benchmark, with one value for all series of a connector."""
    idle = [f"nothing to do, CPU %, {who}" for who in ("prefill server", "decode server", "agents")]
    series = ["idle handover ms", "load handover ms", *idle]
    rounds = {name: [{one: [value] for one in series}] for name, value in values.items()}
    return {"machine": {}, "rounds": rounds}


RESULTS: dict[str, dict[str, Any]] = {
    "bench.json": {"machine": MACHINE, "figures": ROWS},
    "sglang.json": handover(kvbus=14, nixl=34, mooncake_tcp=43),
    "vllm.json": handover(**{"none": 23, "kvbus": 42, "nixl-tuned": 92}),
    "trust-mapped.json": {"64 MiB": {"plain": 8, "keys": 9, "full": 40}},
    "trust-unmapped.json": {"64 MiB": {"plain": 20, "keys": 21, "full": 90}},
}


def test_bars_are_those_of_speeds_and_times_without_their_parts() -> None:
    assert panels(ROWS) == [
        Panel(
            "runs of 256 KiB",
            "GB/s",
            [("kvbus", 5.4), ("bare NIXL", 3.6), ("kvbus as two hosts", 3.0), ("memcpy", 6.0)],
        ),
        Panel("one block of 64 KiB, one handoff at a time", "ms", [("kvbus handoff, median", 0.5)]),
    ]


def test_pictures_are_transparent_and_the_same_for_the_same_figures(tmp_path: Path) -> None:
    from matplotlib.image import imread

    drawn = []
    for name in ("a.svg", "b.svg", "c.png"):
        draw([Panel("one", "ms", BARS), Panel("other", "ms", BARS[:1])], tmp_path / name)
        drawn.append((tmp_path / name).read_bytes())

    assert drawn[0] == drawn[1]
    assert b"<!-- NIXL -->" in drawn[0]
    corner, alphas = imread(tmp_path / "c.png")[0, 0], imread(tmp_path / "c.png")[..., 3]
    assert corner[3] == 0
    assert alphas.max() == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a.pdf", "does not end in .svg or .png"),
        ("absent/a.svg", "No such file or directory"),
        ("folder.svg", "Is a directory"),
    ],
)
def test_undrawable_file_is_refused(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / "folder.svg").mkdir()

    with pytest.raises(ConfigError, match=error):
        check_plot(tmp_path / name)
    check_plot(tmp_path / "a.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_missing_matplotlib_is_named_with_the_extra_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(sys, "path", [str(ROOT)])

    with pytest.raises(ConfigError, match=r"pip install 'kvbus\[plot\]'"):
        check_plot(tmp_path / "a.svg")


def chart(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "benchmarks/plot.py",
        "--results",
        str(folder),
        "--into",
        str(folder),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_chart_of_the_readme_comes_from_files_of_results(tmp_path: Path) -> None:
    for name, found in RESULTS.items():
        ended = chart(tmp_path)
        assert f"{tmp_path / name} is missing: " in ended.stderr
        assert (ended.returncode == 0) == (tmp_path / "bench.json").exists()
        (tmp_path / name).write_text(json.dumps(found))
    ended = chart(tmp_path)

    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
    for theme in ("light", "dark"):
        picture = (tmp_path / f"performance-{theme}.svg").read_text()
        for text in ("SGLang", "Mooncake", "NixlConnector", "bare NIXL", "a CPU, 2 CPUs, 8 GiB"):
            assert text in picture
    for name, text in (
        ("handoffs", "vLLM handoff, 8 at a time"),
        ("bytes", "runs of 256 KiB"),
        ("block", "kvbus handoff, median"),
        ("cpu", "two idle vLLM servers"),
        ("options", "digest = full"),
    ):
        assert text in (tmp_path / f"benchmarks-{name}.svg").read_text()
