"""`kvbus bench`: real agents, real NIXL, figures of each case, and numbers that fit together."""

import json
import os
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvbus.bench.sheet import OF_UNIT, label
from kvbus.cli import app

USUAL = {
    *("contiguous-64m", "scattered-256k", "scattered-16k", "fixed", "rate", "load", "idle"),
    *("tp-1-to-2", "hnd-to-nhd"),
}
WHEN_ASKED = ("large", "park")
LABEL_COLUMNS = 51
Case = dict[str, dict[str, Any]]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--json", *arguments])


def told(*arguments: str) -> dict[str, Any]:
    """The object in the last line of a run of next to no handoffs."""
    result = bench("--rounds", "2", "--scale", "0.005", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def cases(*arguments: str) -> dict[str, Case]:
    """The figures of each case by name, each one checked."""
    rows = told(*arguments)["figures"]
    for one in rows:
        check(one)
    return {
        str(case): {one["name"].strip(): one for one in ones}
        for case, ones in groupby(rows, key=lambda one: one["case"])
    }


def check(one: dict[str, Any]) -> None:
    """A figure has a name, is no less than nothing, and meets its target or does not."""
    assert one["name"].strip(), one
    assert len(label(one["name"]) + OF_UNIT.get(one["unit"], "")) <= LABEL_COLUMNS, one
    assert one["value"] >= 0, one
    if one["target"] is None:
        assert one["met"] is None, one
        return
    sign, limit = one["target"].split()
    is_met = one["value"] >= float(limit) if sign == ">=" else one["value"] <= float(limit)
    assert one["met"] is is_met, one


def check_speeds(case: Case) -> None:
    """Speeds are those of the times beside them, and ratios those of the speeds."""
    speeds = {name: one["value"] for name, one in case.items() if one["unit"] == "GB/s"}
    times = {name: case.get(f"{name} p50") for name in speeds}
    sizes = [speeds[name] * time["value"] for name, time in times.items() if time is not None]
    ratios = [(name, *name.split(" vs ")) for name in case if name.count(" vs ") == 1]
    assert len(sizes) >= 2
    assert min(sizes) > 0
    assert sizes == pytest.approx(sizes[:1] * len(sizes), rel=1e-3)
    for name, of, other in ratios:
        if of in speeds and other in speeds:
            assert case[name]["value"] == pytest.approx(speeds[of] / speeds[other], rel=1e-3)


@pytest.mark.timeout(300)  # it starts about ten processes
def test_figures_of_a_case_fit_together_and_are_drawn(tmp_path: Path) -> None:
    only = [part for name in ("fixed", "scattered-16k", "tp-1-to-2") for part in ("--only", name)]
    found = cases(*only, "--plot", str(tmp_path / "bench.svg"))

    assert list(found) == ["fixed", "scattered-16k", "tp-1-to-2"]
    assert found["fixed"]["handoff p50"]["unit"] == "ms"
    fixed, scattered, _ = (
        {name: one["value"] for name, one in case.items()} for case in found.values()
    )
    assert fixed["handoff p50"] > 0
    assert fixed["offer to released p50"] > 0
    assert not [name for name in fixed if "p99" in name], "of fewer than 100 handoffs"
    ratio = fixed["handoff p50"] / fixed["floor p50"]
    assert fixed["handoff p50 vs floor"] == pytest.approx(ratio, rel=1e-3)
    check_speeds(found["scattered-16k"])
    check_speeds(found["tp-1-to-2"])
    for name in ("raw READ", "kvbus"):
        assert 0 <= scattered[f"{name}, in huge pages"] <= 100
    size = scattered["descriptors"] * (16 << 10)
    assert scattered["raw READ"] * scattered["raw READ p50"] * 1e6 == pytest.approx(size, rel=1e-3)
    assert "bare NIXL, run by run" in (tmp_path / "bench.svg").read_text()
    paths = {"auto vs naive READ", "mapped", "direct", "packed", "memcpy"}
    assert found["tp-1-to-2"].keys() >= paths


@pytest.mark.timeout(300)
def test_parking_is_measured_beside_memcpy_and_the_engine() -> None:
    (case,) = cases("--only", "park").values()
    check_speeds(case)
    values = {name: one["value"] for name, one in case.items()}
    for way in ("mapped", "unmapped"):
        pool, engine = (values[f"{way}, from the {which} p50"] for which in ("pool", "engine"))
        assert values[f"{way}: pool vs engine"] == pytest.approx(pool / engine, rel=1e-2)


@pytest.mark.timeout(300)
def test_interrupted_run_shows_figures_of_earlier_cases() -> None:
    controller, terminal = os.openpty()
    arguments = ["--json", "--scale", "0.1", "--only", "fixed", "--only", "idle"]
    with subprocess.Popen(
        [sys.executable, "-c", "from kvbus.cli import app; app()", "bench", *arguments],
        env={**os.environ, "TERM": "xterm"},  # on a terminal it says what it measures
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    ) as run:
        os.close(terminal)
        shown = b""
        while b"measuring idle" not in shown:
            shown += os.read(controller, 1 << 12)
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate()
    os.close(controller)

    found = json.loads(output.splitlines()[-1])["figures"]
    assert run.returncode == 130
    assert {one["case"] for one in found} == {"fixed"}
    assert "\nfixed: one block of 64 KiB" in output
    assert "idle:" not in output


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_case_gives_figures() -> None:
    asked = [part for name in WHEN_ASKED for part in ("--only", name)]

    assert cases().keys() == USUAL
    assert cases(*asked).keys() == set(WHEN_ASKED)
