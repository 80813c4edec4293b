"""The JSON lines between the demo's driver and its engines: what to do, and how it went.

Refuses nothing itself: both ends are this program.
"""

from typing import Any

import msgspec

from kvbus.demo.step import Step
from kvbus.protocol.engine import StageTimes

MAX_LINE_BYTES = 1 << 20


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is told when it starts; ``flip_one_byte`` is a fault, for a negative control.

    ``num_blocks`` is the size of each rank's cache, ``seed`` that of the model's weights.
    """

    engine_id: str
    attach_path: str
    tp: int
    block_size: int
    num_blocks: int
    layout: str
    cross_layer: bool
    seed: int
    flip_one_byte: bool = False


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute a prompt, offer its KV, and answer `Prefilled`."""

    request_id: str
    prompt: str


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Fetch the KV of ``num_tokens`` tokens, generate ``num_steps`` more, and answer `Decoded`."""

    request_id: str
    ticket: dict[str, Any]
    num_tokens: int
    first_token: int
    num_steps: int


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Answer `Settled` once every block is free again, or after a while in any case."""

    request_id: str = "settle"


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is registered; ``agent_endpoint`` is the peer socket of its agent."""

    agent_endpoint: str
    request_id: str = "ready"


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """The first token, and the ticket of the offer."""

    request_id: str
    step: Step
    ticket: dict[str, Any]
    num_blocks: int


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    """The tokens after the first, and what the fetch took, from its call to its completion."""

    request_id: str
    steps: list[Step]
    num_bytes: int
    path: str
    handoff_s: float
    stages_s: StageTimes


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request ended without its KV."""

    request_id: str
    code: str
    message: str


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """``num_blocks_held`` blocks are still not free."""

    num_blocks_held: int
    request_id: str = "settle"


Work = Prefill | Decode | Settle
Answer = Ready | Prefilled | Decoded | Failed | Settled
