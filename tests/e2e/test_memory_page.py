"""The code on the page about memory runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import torch

from kvbus.engine import BlockingDecode, BlockingMemory
from kvbus.geometry import EngineSpec, KvLayout
from tests.engines import FULL, make_spec

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
PLACES = [(0, "k"), (0, "v"), (1, "k"), (1, "v")]


def test_the_engine_of_the_page_hands_over_its_kv_through_the_ring(prefill, decode):
    example, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    example = re.sub(r"\.\.\. +# send the ticket.*", "received = hand_over(ticket)", example)
    cache = {place: torch.randn(10, 16, 6, 8).bfloat16() for place in PLACES}

    def hand_over(ticket: dict[str, Any]) -> list[torch.Tensor]:
        spec: EngineSpec = make_spec(groups=(FULL,))
        with (
            BlockingMemory(decode.attach, spec, 0) as memory,
            BlockingDecode(decode.attach, spec) as session,
        ):
            shared = memory.allocate(KvLayout.parse("HND"), num_blocks=3)
            session.register()
            session.ready()
            fetch = session.fetch(ticket, num_tokens=40, block_ids={"full": [2, 0, 1]})
            session.wait_completed(fetch)
            return [shared.view(*place)[[2, 0, 1]].flatten(0, 1)[:40].clone() for place in PLACES]

    names = {
        "engine": make_spec(groups=(FULL,)),
        "attach_path": prefill.attach,
        "cache": cache,
        "hand_over": hand_over,
    }
    exec(example, names)  # noqa: S102 - our own page

    sent = [cache[place][[7, 3, 9]].flatten(0, 1)[:40] for place in PLACES]
    assert all(map(torch.equal, sent, names["received"]))
