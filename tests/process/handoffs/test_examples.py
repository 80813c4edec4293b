"""The examples and the code of the documents run as they stand there."""

import re
import runpy
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbus.engine import KvCache, Link, Outcome, RankMemory
from kvbus.geometry import EngineSpec, KvLayout, KvPart
from tests.support.agents import AgentProcess
from tests.support.engines import FULL, make_spec

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
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
    """The cache of 256 tokens has room for one of these prompts."""
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


PLACES = [(layer, part) for layer in (0, 1) for part in (KvPart.KEY, KvPart.VALUE)]
BLOCKS, NUM_TOKENS = [7, 3, 9], 40


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def tokens_of(view: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    return view[block_ids].flatten(0, 1)[:NUM_TOKENS].clone()


def received(decode: AgentProcess, spec: EngineSpec, ticket: Any) -> Any:
    """What a decode engine of three blocks fetches, by layer and part."""
    memory = RankMemory.allocate(spec, 0, KvLayout.parse("NHD"), num_blocks=3)
    cache = KvCache(spec, memory.rank, memory.tensor)
    with Link(decode.attach, spec, memory=memory) as link:
        link.fetch(ticket, num_tokens=NUM_TOKENS, block_ids={"full": [0, 1, 2]}).ended.wait()
        return [tokens_of(cache.view(*place), [0, 1, 2]) for place in PLACES]


def test_the_sdk_page_shows_parts_of_the_example_that_runs() -> None:
    shown = examples("docs/engines.md")[:2]
    example = HANDOFF.read_text("utf-8")
    assert [part for part in shown if part not in example] == []


def test_memory_page_engine_hands_over_kv_through_ring(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    example, *_ = examples("docs/memory.md")
    example = re.sub(r"\.\.\. +# send offer.ticket.*", "got = hand_over(offer.ticket)", example)
    cache = {place: torch.randn(10, 16, 6, 8).bfloat16() for place in PLACES}
    spec, ours = (make_spec(groups=(FULL,)) for _ in range(2))
    names: dict[str, Any] = {
        "engine": spec,
        "attach_path": prefill.attach,
        "cache": cache,
        "hand_over": lambda ticket: received(decode, ours, ticket),
    }
    exec(example, names)  # noqa: S102 - our own page
    sent = [tokens_of(cache[place], BLOCKS) for place in PLACES]
    assert all(map(torch.equal, sent, names["got"]))


def test_reuse_page_prefill_engine_loads_prefix_of_another(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    names: dict[str, Any] = {}
    exec("\n".join(examples("docs/reuse.md")), names)  # noqa: S102 - our own page
    prefix = list(range(32))
    with ExitStack() as stack:
        (source, offers, _), (target, onwards, fetches) = (
            both_ways(stack, names["link_both"], prefill, decode) for _ in range(2)
        )
        for place in PLACES:
            source.view(*place).normal_()
        offer = names["offer_prefix"](offers, prefix, [7, 3])

        assert names["load_prefix"](fetches, offer.ticket, prefix[::-1], [5, 6]) == 0
        assert names["load_prefix"](fetches, offer.ticket, prefix, [4, 1]) == len(prefix)

        assert offer.ended.wait(WITHIN_S) is Outcome.COMPLETED
        longer = onwards.offer("longer", num_tokens=NUM_TOKENS, block_ids={"full": [4, 1, 8]})
        got = received(decode, make_spec(groups=(FULL,)), longer.ticket)
        for place, tensor in zip(PLACES, got, strict=True):
            assert torch.equal(tensor, tokens_of(target.view(*place), [4, 1, 8]))
            assert torch.equal(tensor[:32], source.view(*place)[[7, 3]].flatten(0, 1))


def both_ways(
    stack: ExitStack, link_both: Any, prefill: AgentProcess, decode: AgentProcess
) -> tuple[KvCache, Link, Link]:
    """An engine of ten blocks that offers and fetches."""
    spec = make_spec(groups=(FULL,))
    memory = RankMemory.allocate(spec, 0, KvLayout.parse("NHD"), num_blocks=10)
    links = link_both(spec, memory, prefill.attach, decode.attach)
    offers, fetches = map(stack.enter_context, links)
    return KvCache(spec, memory.rank, memory.tensor), offers, fetches
