"""The survivor tool passes under its events, and fails when a request does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import HAVE_NAMESPACES

ROOT = Path(__file__).parents[3]
ENDS_WITHIN_S, SHORT_WITHIN_S = 150, 400


def run(*arguments: str, within_s: float = ENDS_WITHIN_S) -> tuple[int, dict[str, Any]]:
    if not HAVE_NAMESPACES:
        pytest.skip("needs root and iproute2")
    command = [sys.executable, "-m", "tests.tools.survivor", *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.long
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
    assert report["longest_pauses"]["cut"] > 0


@pytest.mark.timeout(SHORT_WITHIN_S + 10)
def test_no_request_fails_under_agent_and_network_events() -> None:
    """Fifty events; ``make survivor`` causes a thousand."""
    short = ["--clusters", "4", "--events", "50", "--minutes", "5"]
    status, report = run("--seed", "1", *short, within_s=SHORT_WITHIN_S)

    assert (status, report["passed"]) == (0, True), json.dumps(report["failures"], indent=1)
    assert sum(report["events_by_kind"].values()) >= 50
