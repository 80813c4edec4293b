"""kvbus's own SDK keeps to the page, in both roles."""

import sys
from pathlib import Path

import pytest

from kvbus.conform.book import Verdict
from kvbus.conform.play import play
from kvbus.protocol.engine import AgentRole
from tests.conform.engines import HERE, named


@pytest.mark.parametrize("role", AgentRole)
def test_the_sdk_breaks_no_rule(role: AgentRole, tmp_path: Path) -> None:
    outcomes = play(role, [sys.executable, str(HERE / "sdk_engine.py")], log=tmp_path / "log")

    assert named(outcomes, Verdict.FAILED) == {}
    assert named(outcomes, Verdict.UNTRIED) == {}
