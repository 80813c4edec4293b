"""Worlds in which nothing may go wrong, whatever does; and that a world can be had again."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.simulator import mutants
from tests.simulator.__main__ import app
from tests.simulator.report import lines
from tests.simulator.settings import CALM, CROWDED, SLUGGISH, Settings
from tests.simulator.world import World


def run(settings: Settings, seed: int, num_handoffs: int) -> World:
    world = World(settings, seed=seed, num_handoffs=num_handoffs)
    world.run()
    return world


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("settings", "least_share"),
    [(CALM, 0.95), (CROWDED, 0.4), (SLUGGISH, 0.1), (replace(Settings(), agents=8), 0.9)],
    ids=["calm", "crowded", "sluggish", "plain"],
)
def test_no_invariant_is_broken_and_handoffs_complete(
    settings: Settings, least_share: float, seed: int
) -> None:
    world = run(settings, seed, 600)

    assert world.counts["fetches completed"] >= least_share * world.counts["handoffs"]


def test_a_world_has_every_fault_and_every_path_in_it() -> None:
    counts = run(CROWDED, 3, 1500).counts

    faults = (
        "crashes",
        "stops",
        "engines lost",
        "lost",
        "busy",
        "stale",
        "timeouts",
        "repeats",
        "recycled",
        "bits flipped",
        "differences",
    )
    paths = ("mapped", "direct", "tcp", "mapped ahead", "direct ahead", "packed", "reordered")
    ends = ("leases expired", "leases revoked", "offers expired", "fetches cancelled")
    meetings = ("Awaited", "Forgone", "offers met")
    seen = {name for name, number in counts.items() if number}
    assert not {*faults, *(f"read {path}" for path in paths), *ends, *meetings} - seen


def test_a_seed_replays_its_world() -> None:
    first, again = run(CROWDED, 5, 300), run(CROWDED, 5, 300)

    assert list(lines(first)) == list(lines(again))


def test_the_command_tells_how_to_replay_what_it_found_and_what_led_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutants.a_refused_confirm_is_taken_for_a_yes(monkeypatch)
    arguments = ["--world", "crowded", "--seed", "1", "--handoffs", "1000"]

    ended = CliRunner().invoke(app, arguments)

    assert ended.exit_code == 1
    assert "invariant 2" in ended.output
    assert "Requested -> " in ended.output
    assert "--world crowded --seed 1 --handoffs 1000" in ended.output
