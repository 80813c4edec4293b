"""The code in the README runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import torch

from kvbus.engine import BlockingDecode, BlockingMemory
from kvbus.geometry import EngineSpec, KvLayout, KvPart

README = Path(__file__).parents[2] / "README.md"


def test_the_two_engines_of_the_readme_hand_over_their_kv(prefill, decode):
    offering, fetching = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    offering = offering.replace("/run/kvbus/prefill-0/attach.sock", str(prefill.attach))
    offering = re.sub(r"\.\.\. +# compute.*", "keys.normal_()", offering)
    offering = re.sub(r"\.\.\. +# send offer.ticket.*", "received = hand_over(offer)", offering)
    names: dict[str, Any] = {}

    def hand_over(offer: Any) -> torch.Tensor:
        spec: EngineSpec = on_the_decode_side(names["engine"])
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


def on_the_decode_side(engine: EngineSpec) -> EngineSpec:
    """The same engine under another id."""
    return EngineSpec("decode-engine-0", engine.model, engine.tp_size, engine.groups)
