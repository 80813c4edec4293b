"""The JSON lines between the demo's driver and its engines: what to do, and how it went."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from kvbus.demo.model_config import ModelConfig
from kvbus.demo.options import EngineShape
from kvbus.protocol.engine import StageTimes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One generated token; ``digest`` is the blake2b of the float32 logits that it came from."""

    token: int
    digest: str

    @classmethod
    def greedy(cls, logits: "Tensor") -> "Step":
        """The most likely token; of equals, the lowest."""
        digest = blake2b(logits.numpy().astype("<f4").tobytes(), digest_size=16)
        return cls(token=int(logits.argmax()), digest=digest.hexdigest())


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is told when it starts; ``flip_one_byte`` is a fault, for a negative control.

    The caches are as large as ``concurrency`` requests need, each of ``max_prompt_tokens`` and
    ``max_new_tokens`` at most, so that all blocks are reused. A ring of host blocks, if the engine
    has one, is ``ring_share`` of that.
    """

    engine_id: str
    attach_path: str
    model: ModelConfig
    shape: EngineShape
    concurrency: int
    max_prompt_tokens: int
    max_new_tokens: int
    prefill_chunk: int | None = None
    ring_share: float = 0.5
    flip_one_byte: bool = False


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute a prompt, offer its KV, and answer `Offered` and `Prefilled`."""

    request_id: str
    prompt: str


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Fetch the KV of ``num_tokens`` tokens, await `FirstToken`, generate, answer `Decoded`."""

    request_id: str
    ticket: dict[str, Any]
    num_tokens: int
    num_steps: int


class FirstToken(msgspec.Struct, frozen=True, tag="first_token"):
    """What a request's `Decode` goes on from. It has no answer."""

    request_id: str
    token: int


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Answer `Settled` once every block is free again, or none has come back for a while."""

    request_id: str = "settle"


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is registered; ``agent_endpoint`` is the peer socket of its agent."""

    agent_endpoint: str
    request_id: str = "ready"


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """The ticket of the offer; of a chunked prefill, it comes before there is any KV."""

    request_id: str
    ticket: dict[str, Any]


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """All KV is computed, in ``num_blocks`` blocks, and the first token is known.

    ``computed_at_s`` is when the last of it was, by the machine's monotonic clock.
    """

    request_id: str
    step: Step
    num_blocks: int
    computed_at_s: float


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    """The tokens after the first, and what the fetch took, from its call to its completion.

    ``fetched_at_s`` is when it completed, by the machine's monotonic clock.
    """

    request_id: str
    steps: list[Step]
    num_bytes: int
    path: str
    handoff_s: float
    fetched_at_s: float
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


Work = Prefill | Decode | FirstToken | Settle
Answer = Ready | Offered | Prefilled | Decoded | Failed | Settled
