"""`kvbus demo-prefill | kvbus demo-decode` of which one goes away, or the fetches fail: both end,
and say so.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents import Agents

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]
ENDS_WITHIN_S = 100.0
LOOK_THERE = "look at the error of kvbus demo-decode"


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


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_agent_of_the_other_role_is_refused_before_the_first_request(
    role: str, agents: Agents
) -> None:
    at_prefill, at_decode = (agent.attach for agent in agents.all)
    other = at_decode if role == "prefill" else at_prefill

    alone = side(role, other, stdin=subprocess.PIPE)
    output, errors = alone.communicate("", timeout=ENDS_WITHIN_S)

    assert (alone.returncode, output, errors.count("\n")) == (2, "", 1)
    assert f"kvbus demo-{role} needs the socket of a {role} agent" in errors


@pytest.mark.parametrize(("num_requests", "num_read"), [(4, 4), (30, 1)])
def test_the_prefill_side_ends_with_a_message_when_nobody_reads_any_more(
    agents: Agents, num_requests: int, num_read: int
) -> None:
    """Though it has no line left to write, and though its cache has no room for the next."""
    offering = side("prefill", agents.all[0].attach, "--requests", str(num_requests))
    assert offering.stdout is not None
    for _ in range(num_read):
        offering.stdout.readline()
    offering.stdout.close()
    _, complained = offering.communicate(timeout=ENDS_WITHIN_S)

    told = f"error: nobody reads the lines any more: {LOOK_THERE}"
    assert (offering.returncode, complained.splitlines()[-1]) == (1, told)


def test_the_decode_side_ends_with_a_message_when_the_prefill_side_goes_away(
    agents: Agents,
) -> None:
    at_prefill, at_decode = (agent.attach for agent in agents.all)
    offering = side("prefill", at_prefill, "--requests", "4")
    fetching = side("decode", at_decode, "--requests", "4", stdin=subprocess.PIPE)
    assert offering.stdout is not None
    first = offering.stdout.readline()
    offering.kill()
    offering.communicate()

    said, complained = fetching.communicate(first, timeout=ENDS_WITHIN_S)

    assert (fetching.returncode, " did not finish" in said) == (1, True)
    assert "error: stdin ended before the last handoff: look at the error of" in complained


def test_the_blocks_of_a_fetch_that_failed_are_not_waited_for(agents: Agents) -> None:
    at_prefill, at_decode = (agent.attach for agent in agents.all)
    offering = side("prefill", at_prefill, "--requests", "2")
    other_model = ("--requests", "2", "--kv-heads", "2")
    fetching = side("decode", at_decode, *other_model, stdin=offering.stdout)
    assert offering.stdout is not None
    offering.stdout.close()  # the other side has it

    said, failed = fetching.communicate(timeout=ENDS_WITHIN_S)
    _, complained = offering.communicate(timeout=ENDS_WITHIN_S)

    assert (fetching.returncode, "error: 2 failed: incompatible: " in failed) == (1, True), failed
    assert "2 requests, 0 outputs equal" in said
    unread = "not all of 2 offers were read, 2 ended otherwise"
    assert offering.returncode == 1
    assert complained.splitlines()[-1] == f"error: {unread}: {LOOK_THERE}"
