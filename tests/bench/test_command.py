"""`kvbus bench`: real agents, real NIXL, figures of each case, and numbers that fit together."""

import json
from itertools import groupby
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app

USUAL = {
    *("contiguous-64m", "contiguous-256m", "scattered-256k", "scattered-16k", "fixed", "load"),
    *("priority", "idle", "rate", "burst", "tp-1-to-2", "tp-2-to-1", "hnd-to-nhd"),
    *("block-64-to-16", "mla-2-to-1", "chunked", "host"),
}
WHEN_ASKED = ("memory", "large", "digests", "warm", "cost")
ENGINES_AND_AGENTS = {"decode engine", "decode agent", "prefill agent", "prefill engine"}
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
    assert one["value"] >= 0, one
    if one["target"] is None:
        assert one["met"] is None, one
        return
    sign, limit = one["target"].split()
    is_met = one["value"] >= float(limit) if sign == "≥" else one["value"] <= float(limit)
    assert one["met"] is is_met, one


def check_speeds(case: Case) -> None:
    """Speeds are those of the times beside them, and ratios those of the speeds."""
    speeds = {name: one["value"] for name, one in case.items() if one["unit"] == "GB/s"}
    times = {name: case.get(f"{name} p50") for name in speeds}
    sizes = [speeds[name] * time["value"] for name, time in times.items() if time is not None]
    ratios = [(name, *name.split(" of ")) for name in case if name.count(" of ") == 1]
    assert len(sizes) >= 2
    assert min(sizes) > 0
    assert sizes == pytest.approx(sizes[:1] * len(sizes), rel=1e-3)
    for name, of, other in ratios:
        if of in speeds and other in speeds:
            assert case[name]["value"] == pytest.approx(speeds[of] / speeds[other], rel=1e-3)


@pytest.mark.timeout(300)  # it starts some ten processes
def test_figures_of_a_case_fit_together() -> None:
    found = cases("--only", "fixed", "--only", "scattered-16k", "--only", "tp-1-to-2")

    fixed = {name: one["value"] for name, one in found["fixed"].items()}
    assert list(found) == ["fixed", "scattered-16k", "tp-1-to-2"]
    assert 0 < fixed["handoff p50"] <= fixed["handoff p99"]
    assert 0 < fixed["offer to released p50"] <= fixed["offer to released p99"]
    assert found["fixed"]["handoff p50"]["unit"] == "ms"
    check_speeds(found["scattered-16k"])
    check_speeds(found["tp-1-to-2"])
    scattered = {name: one["value"] for name, one in found["scattered-16k"].items()}
    assert scattered["raw"] * scattered["raw p50"] * 1e6 == pytest.approx(
        scattered["descriptors"] * (16 << 10), rel=1e-3
    )
    assert found["tp-1-to-2"].keys() >= {"auto of naive", "mapped", "direct", "packed", "memcpy"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_case_gives_figures() -> None:
    asked = [part for name in WHEN_ASKED for part in ("--only", name)]

    assert cases().keys() == USUAL
    assert cases(*asked).keys() == set(WHEN_ASKED)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trace_has_hops_of_all_four_processes_between_the_call_and_its_return() -> None:
    hops = told("--trace", "--scale", "0.05")["trace"]

    at_us = {(hop["process"], hop["what"]): hop["at_us"] for hop in hops}
    assert {hop["process"] for hop in hops} == ENGINES_AND_AGENTS
    assert (
        0
        == at_us["decode engine", "fetch is called"]
        < at_us["decode agent", "ReadTable: ChunkWanted"]
        < at_us["prefill agent", "take: read"]
        < at_us["decode engine", "completed() returns"]
    )


@pytest.mark.parametrize("arguments", [("--only", "everything"), ("--trace", "--only", "fixed")])
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...]) -> None:
    assert bench(*arguments).exit_code == 2
