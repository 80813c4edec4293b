"""What the demo's driver and its engines tell each other."""

from dataclasses import dataclass

import msgspec

from kvbus.geometry import EngineSpec, KvLayout


@dataclass(frozen=True)
class Step:
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
    seed: int
    prefill_chunk: int | None
    flip_one_byte: bool


class Computed(msgspec.Struct, frozen=True):
    """A prompt's KV is there, in ``num_blocks`` blocks; ``step`` is the first of the output.

    ``at_s`` is when the last of it was, by the machine's monotonic clock.
    """

    step: Step
    num_blocks: int
    at_s: float
