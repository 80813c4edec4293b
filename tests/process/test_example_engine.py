"""The toy engine of examples/ hands prompts over, and both of its processes end by themselves."""

import subprocess
import sys
from pathlib import Path

from tests.agents import AgentProcess

ENGINE = Path(__file__).parents[2] / "examples" / "engine.py"
PROMPTS = "Hello, world!\nWho reads this?\n"


def run(role: str, agent: AgentProcess, lines: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ENGINE), role, str(agent.attach)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None
    child.stdin.write(lines)
    child.stdin.close()
    return child


def test_prompts_come_over_as_the_kv_of_one_engine_in_the_other(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    with run("prefill", prefill, PROMPTS) as offering:
        assert offering.stdout is not None
        tickets = "".join(offering.stdout.readline() for _ in PROMPTS.splitlines())
        with run("decode", decode, tickets) as fetching:
            assert fetching.stdout is not None
            answers = fetching.stdout.read()
        assert fetching.returncode == 0
    assert sorted(answers.splitlines()) == sorted(PROMPTS.splitlines())
    assert offering.returncode == 0
