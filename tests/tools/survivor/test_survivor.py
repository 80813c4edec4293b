"""The survivor tool draws what it should, measures pauses, and fails when a request does."""

import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import HAVE_NAMESPACES
from tests.tools.survivor.draws import KINDS, PREFILL, draw_events
from tests.tools.survivor.ledger import Happened, Pause, add_pauses

ROOT = Path(__file__).parents[3]
ENDS_WITHIN_S, SHORT_WITHIN_S = 150, 400
NUM_DRAWN = 2000


def run(*arguments: str, within_s: float = ENDS_WITHIN_S) -> tuple[int, dict[str, Any]]:
    """The exit status and the report of one run."""
    if not HAVE_NAMESPACES:
        pytest.skip("needs root and iproute2")
    command = [sys.executable, "-m", "tests.tools.survivor", *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.timeout(ENDS_WITHIN_S + 10)
def test_a_run_fails_if_a_request_does() -> None:
    """Deadlines are shorter than the cuts."""
    few = ["--clusters", "1", "--events", "3", "--timeout-s", "0.3", "--ttl-s", "20"]
    status, report = run("--kinds", "cut", "--seed", "3", *few)

    assert (status, report["passed"]) == (1, False)
    assert report["events_by_kind"] == {"cut": 3}
    assert report["counts"]["completed"]
    assert report["counts"]["failed"]
    assert any("timeout" in group for group in report["failures"])
    assert report["longest_pauses"]["cut"]["pause_s"] > 0


@pytest.mark.timeout(SHORT_WITHIN_S + 10)
def test_no_request_fails_under_agent_and_network_events() -> None:
    """Fifty events; ``make survivor`` causes a thousand."""
    short = ["--clusters", "4", "--events", "50", "--minutes", "5"]
    status, report = run("--seed", "1", *short, within_s=SHORT_WITHIN_S)

    assert (status, report["passed"]) == (0, True), json.dumps(report["failures"], indent=1)
    assert sum(report["events_by_kind"].values()) >= 50


def test_events_are_drawn_from_seed_within_limits_of_their_kind() -> None:
    drawn = list(islice(draw_events("1", KINDS), NUM_DRAWN))

    assert list(islice(draw_events("1", KINDS), NUM_DRAWN)) == drawn
    assert list(islice(draw_events("2", KINDS), NUM_DRAWN)) != drawn
    assert Counter(event.kind for event in drawn).keys() == KINDS.keys()
    for event in drawn:
        kind = KINDS[event.kind]
        assert event.role in kind.roles
        assert kind.least_s <= event.for_s <= kind.most_s
    assert {event.role for event in drawn if event.kind == "move_agent"} == {PREFILL}
    assert {event.kind for event in islice(draw_events("1", ["cut"]), NUM_DRAWN)} == {"cut"}


@pytest.mark.parametrize(
    ("completed_s", "pauses"),
    [
        ([0.0, 1.0, 5.0, 6.0], {"cut": Pause(3.0, 2.0)}),
        ([0.0, 3.0, 7.0], {"cut": Pause(4.0, 1.0)}),
        ([0.0, 1.9, 9.0], {"cut": Pause(7.0, 2.0)}),
        ([0.0, 1.0, 2.5, 8.5, 9.5, 14.5], {"cut": Pause(6.0, 1.5), "reset": Pause(5.0, 0.0)}),
    ],
    ids=["from its start", "after its start", "of the first", "of the last before"],
)
def test_a_pause_is_charged_to_one_event(
    completed_s: list[float], pauses: dict[str, Pause]
) -> None:
    happened = [Happened("cut", PREFILL, 2.0, 4.0), Happened("reset", PREFILL, 8.5, 8.5)]
    found: dict[str, Pause] = {}

    add_pauses(found, happened, completed_s)

    assert found == pauses
