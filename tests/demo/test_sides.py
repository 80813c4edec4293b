"""`kvbus demo-prefill | kvbus demo-decode` of which the fetches fail: both end, and say so."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents import Agents

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
ENDS_WITHIN_S = 100.0


def side(role: str, attach: Path, *options: str, **streams: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*KVBUS, f"demo-{role}", "--attach", str(attach), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **streams,
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_that_there_is_no_agent_is_said_at_once(role: str, tmp_path: Path) -> None:
    alone = side(role, tmp_path / "attach.sock", stdin=subprocess.PIPE)

    output, errors = alone.communicate("", timeout=ENDS_WITHIN_S)

    told = f"error: no agent at {tmp_path / 'attach.sock'}: No such file or directory\n"
    assert (alone.returncode, output, errors) == (1, "", told)


def test_the_blocks_of_a_fetch_that_failed_are_not_waited_for(agents: Agents) -> None:
    at_prefill, at_decode = (agent.attach for agent in agents.all)
    offering = side("prefill", at_prefill, "--requests", "2")
    other_model = ("--requests", "2", "--kv-heads", "2")
    fetching = side("decode", at_decode, *other_model, stdin=offering.stdout)
    assert offering.stdout is not None
    offering.stdout.close()  # the other side has it

    said, failed = fetching.communicate(timeout=ENDS_WITHIN_S)
    _, complained = offering.communicate(timeout=ENDS_WITHIN_S)

    assert (fetching.returncode, failed.count("incompatible")) == (1, 2), failed
    assert "2 requests, 0 outputs equal" in said
    assert (offering.returncode, complained) == (0, "")
