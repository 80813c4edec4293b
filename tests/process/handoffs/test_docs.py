"""The code of the documents runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import torch

from kvbus.engine import KvCache, Link, RankMemory
from kvbus.geometry import EngineSpec, KvLayout, KvPart
from tests.support.agents import AgentProcess
from tests.support.engines import FULL, make_spec

ROOT = Path(__file__).parents[3]
PLACES = [(layer, part) for layer in (0, 1) for part in (KvPart.KEY, KvPart.VALUE)]
BLOCKS, NUM_TOKENS = [7, 3, 9], 40
"""What the engine of the page offers."""


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


def test_the_readme_shows_a_part_of_the_example_that_runs() -> None:
    (shown,) = examples("README.md")

    assert shown in (ROOT / "examples/handoff.py").read_text("utf-8")


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
