"""The Python engines of examples/ hand KV over, and their processes end by themselves."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess

EXAMPLES = Path(__file__).parents[3] / "examples"
ENGINE, HANDOFF = EXAMPLES / "engine.py", EXAMPLES / "handoff.py"
WITHIN_S = 30.0
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


def test_prompt_waits_for_blocks_and_oversized_one_is_left_out(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    """The cache has 256 tokens, so that two of these prompts do not fit at once."""
    prompts = [letter * 200 for letter in "abc"]
    with run("prefill", prefill, "\n".join(["d" * 257, *prompts])) as offering:
        command = [sys.executable, str(ENGINE), "decode", str(decode.attach)]
        answers = subprocess.check_output(command, stdin=offering.stdout, text=True)
    assert answers.splitlines() == prompts
    assert offering.returncode == 0


def test_the_handoff_of_the_examples_prints_that_the_kv_is_equal(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    command = [sys.executable, str(HANDOFF), str(prefill.attach), str(decode.attach)]
    output = subprocess.check_output(command, text=True, timeout=2 * WITHIN_S)
    assert output == "40 tokens handed off, equal: True\n"


def test_example_handoff_recomputes_after_failed_fetch(
    prefill: AgentProcess, decode: AgentProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    names = runpy.run_path(str(HANDOFF))
    link, _ = names["attach"](str(prefill.attach), "withdraws-its-offer")
    other_link, _ = names["attach"](str(decode.attach), "recomputes")
    with link, other_link:
        offer = link.offer("request-1", num_tokens=40, block_ids={"full": [7, 3, 9]})
        ticket = offer.ticket
        offer.withdraw()
        offer.ended.wait(WITHIN_S)

        assert not names["fetch_or_recompute"](other_link, ticket, [0, 1, 2])
    assert capsys.readouterr().out.startswith("recompute the prompt: ")
