"""What the two sides of the demo, and they and their engines, tell each other."""

from typing import Any

import msgspec

from kvbus.geometry import EngineSpec, KvLayout


class Step(msgspec.Struct, frozen=True):
    """One generated token; ``digest`` is the blake2b of the float32 logits that it came from.

    It also shows an error that is too small to change the token.
    """

    token: int
    digest: str


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is told when it starts; ``flip_one_byte`` is a fault, for a negative control.

    The blocks are by group, see `kvbus.lab.engine.Engine`. A prefill engine computes
    ``prefill_chunk`` tokens before it offers them, None: all.
    """

    attach_path: str
    spec: EngineSpec
    layout: KvLayout
    num_blocks: dict[str, int]
    ring_blocks: dict[str, int] | None
    prefill_chunk: int | None
    flip_one_byte: bool


class Handed(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the prefill side tells of a request: its ticket, and later, when its KV is there, the
    ``first`` step of the output. Of one that ``failed`` there is no more.
    """

    request_id: str
    prompt: str
    ticket: dict[str, Any] = {}
    first: Step | None = None
    failed: str = ""
