"""kvbus's own SDK keeps to the page, in both roles, async and blocking."""

import sys
from pathlib import Path

import pytest

from kvbus.conform.book import Verdict
from kvbus.conform.play import play
from kvbus.protocol import AgentRole
from tests.conform.engines import HERE, named


@pytest.mark.parametrize("role", AgentRole)
@pytest.mark.parametrize("engine", ["sdk_engine", "sdk_blocking"])
def test_the_sdk_breaks_no_rule(engine: str, role: AgentRole, tmp_path: Path) -> None:
    outcomes = play(role, [sys.executable, str(HERE / f"{engine}.py")], log=tmp_path / "log")

    assert named(outcomes, Verdict.FAILED) == {}
    # A prefill engine with blocking calls has one request at a time.
    assert named(outcomes, Verdict.UNTRIED).keys() <= {"requests.order"}
