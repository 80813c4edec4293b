"""The code of the documents runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import torch

from kvbus.engine import BlockingDecode, BlockingMemory
from kvbus.geometry import EngineSpec, KvLayout, KvPart
from tests.agents import AgentProcess
from tests.engines import FULL, make_spec

ROOT = Path(__file__).parents[2]
PLACES = [(layer, part) for layer in (0, 1) for part in (KvPart.KEY, KvPart.VALUE)]


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def test_the_two_engines_of_the_readme_hand_over_their_kv(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    offering, fetching = examples("README.md")
    offering = offering.replace("/run/kvbus/prefill-0/attach.sock", str(prefill.attach))
    offering = re.sub(r"\.\.\. +# compute.*", "keys.normal_()", offering)
    offering = re.sub(r"\.\.\. +# send offer.ticket.*", "received = hand_over(offer)", offering)
    names: dict[str, Any] = {}

    def hand_over(offer: Any) -> torch.Tensor:
        engine: EngineSpec = names["engine"]
        spec = EngineSpec("decode-engine-0", engine.model, engine.tp_size, engine.groups)
        with (
            BlockingMemory(decode.attach, spec, 0) as memory,
            BlockingDecode(decode.attach, spec) as session,
        ):
            cache = memory.allocate(KvLayout.parse("NHD"), num_blocks=3)
            session.register()
            session.ready()
            exec(fetching, {"decode": session, "ticket": offer.ticket})  # noqa: S102 - our own page
            return cache.view(0, KvPart.KEY).flatten(0, 1)[:40].clone()

    names["hand_over"] = hand_over
    exec(offering + "    sent = keys[[7, 3, 9]].flatten(0, 1)[:40].clone()\n", names)  # noqa: S102 - our own page

    assert torch.equal(names["sent"], names["received"])


def test_the_engine_of_the_memory_page_hands_over_its_kv_through_the_ring(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    example, *_ = examples("docs/memory.md")
    example = re.sub(r"\.\.\. +# send the ticket.*", "received = hand_over(ticket)", example)
    cache = {place: torch.randn(10, 16, 6, 8).bfloat16() for place in PLACES}

    def hand_over(ticket: dict[str, Any]) -> list[torch.Tensor]:
        spec = make_spec(groups=(FULL,))
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

    names: dict[str, Any] = {
        "engine": make_spec(groups=(FULL,)),
        "attach_path": prefill.attach,
        "cache": cache,
        "hand_over": hand_over,
    }
    exec(example, names)  # noqa: S102 - our own page

    sent = [cache[place][[7, 3, 9]].flatten(0, 1)[:40] for place in PLACES]
    assert all(map(torch.equal, sent, names["received"]))
