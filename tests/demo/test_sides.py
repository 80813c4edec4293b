"""`kvbus demo-prefill | kvbus demo-decode` of which the fetches fail: both end, and say so."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import Agents, agents_ended

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
ENDS_WITHIN_S = 100.0


@pytest.fixture
def agents() -> Iterator[Agents]:
    """A prefill and a decode agent, which must hold nothing in the end."""
    with agents_ended(Agents) as made:
        made.start(made.prepare("prefill"), made.prepare("decode"))
        yield made
        made.check()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_that_there_is_no_agent_is_said_at_once(role: str, tmp_path: Path) -> None:
    attach = tmp_path / "attach.sock"

    side = subprocess.run(
        [*KVBUS, f"demo-{role}", "--attach", str(attach)],
        input="",
        capture_output=True,
        text=True,
        check=False,
        timeout=ENDS_WITHIN_S,
    )

    told = f"error: no agent at {attach}: No such file or directory\n"
    assert (side.returncode, side.stdout, side.stderr) == (1, "", told)


def test_a_terminal_has_no_tickets(tmp_path: Path) -> None:
    controller, terminal = os.openpty()
    try:
        side = subprocess.run(
            [*KVBUS, "demo-decode", "--attach", str(tmp_path / "attach.sock")],
            stdin=terminal,
            capture_output=True,
            text=True,
            check=False,
            timeout=ENDS_WITHIN_S,
        )
    finally:
        os.close(controller)
        os.close(terminal)

    assert side.returncode == 2
    assert "stdin is no pipe" in side.stderr


def test_the_blocks_of_a_fetch_that_failed_are_not_waited_for(agents: Agents) -> None:
    sides = [
        [*KVBUS, f"demo-{agent.role}", "--attach", str(agent.attach), "--requests", "2"]
        for agent in agents.all
    ]
    sides[1] += ["--kv-heads", "2"]  # of another model than the prefill engine's
    prefill = subprocess.Popen(sides[0], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    decode = subprocess.Popen(
        sides[1], stdin=prefill.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert prefill.stdout is not None
    prefill.stdout.close()  # the other side has it

    decoded, failed = decode.communicate(timeout=ENDS_WITHIN_S)
    _, complained = prefill.communicate(timeout=ENDS_WITHIN_S)

    assert (decode.returncode, failed.count("incompatible")) == (1, 2), failed
    assert "2 requests, 0 outputs equal" in decoded
    assert (prefill.returncode, complained) == (0, "")
