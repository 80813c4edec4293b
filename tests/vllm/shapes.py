"""The deployments that tests run on: models, parallelism, block sizes, policies of both sides.

Refuses to start any. A start takes half a minute: tests of one shape stand next to each other, to
share it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CHUNK_TOKENS = 256
CHUNKED = ("--max-num-batched-tokens", str(CHUNK_TOKENS))
SMALLER, LARGER = 32, 64
OFFER_TTL_S = 10.0
"""For tickets that never reach the decode side's engine, as a client hung up too soon."""
FETCH_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Side:
    """One server, apart from its wiring, and the settings of its agent."""

    cores: str
    model: str = "gqa"
    tp: int = 1
    block_size: int | None = None
    flags: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def all_flags(self) -> list[str]:
        """The flags of its command line."""
        size = [] if self.block_size is None else ["--block-size", str(self.block_size)]
        return ["--tensor-parallel-size", str(self.tp), *size, *self.flags]


@dataclass(frozen=True)
class Shape:
    """Both sides, and what vLLM does with a request whose KV could not be loaded.

    With ``keys`` the agents have CURVE keys, and sign their tickets. With ``alias`` the servers
    call kvbus' connector `NixlConnector`. ``turns`` is what the options say of conversations: then
    each server has an agent of each kind.
    """

    prefill: Side
    decode: Side
    policy: str = "recompute"
    keys: bool = False
    alias: bool = False
    turns: Mapping[str, Any] | None = None


def both(model: str) -> Shape:
    """Two sides that are alike."""
    return Shape(Side("0", model), Side("1", model))


UP = Shape(
    Side("0", block_size=SMALLER, flags=CHUNKED, settings={"offer_ttl_s": OFFER_TTL_S}),
    Side(
        "1",
        block_size=LARGER,
        flags=CHUNKED,
        settings={"fetch_timeout_s": FETCH_TIMEOUT_S, "mapped": True},
    ),
)
"""Small blocks to large ones, prompts cut into chunks and cached.

Memory is mapped, as it is for users who have both servers on one machine; other shapes use NIXL.
"""

FAILING = Shape(
    Side("0", block_size=LARGER, settings={"offer_ttl_s": OFFER_TTL_S}),
    Side("1", block_size=SMALLER),
    policy="fail",
)
"""Large blocks to small ones; a request whose KV cannot be loaded fails."""

PATIENT = both("gqa")
"""Offers wait for long, as agents do by themselves."""

SPLIT = Shape(Side("0"), Side("0|1", tp=2), keys=True)
JOINED = Shape(Side("0|1", tp=2), Side("1"))
OTHERS = Shape(Side("0", settings={"offer_ttl_s": OFFER_TTL_S}), Side("1", "other"))

CROWDED_TOKENS = 704
CROWDED = Shape(
    Side(
        "0",
        block_size=SMALLER,
        flags=(
            *("--max-num-batched-tokens", "64"),
            *("--max-model-len", str(CROWDED_TOKENS)),
            *("--num-gpu-blocks-override", str(1 + CROWDED_TOKENS // SMALLER)),
        ),
        settings={"offer_ttl_s": OFFER_TTL_S},
    ),
    Side("1", settings={"fetch_timeout_s": FETCH_TIMEOUT_S}),
)
"""Prefill has room for 704 tokens, fewer than two requests may come to have."""

IN_WORDS = ("--no-skip-tokenizer-init",)
ROUTED = Shape(
    Side("0", block_size=SMALLER, flags=(*CHUNKED, *IN_WORDS)),
    Side("1", block_size=LARGER, flags=(*CHUNKED, *IN_WORDS)),
    policy="fail",
    alias=True,
)
"""Behind routers, of which one looks at the connector's name; clients send words."""

TURN_TTL_S = 15.0
CONVERSATIONS = {"decoder_kv_blocks_ttl": TURN_TTL_S, "fetch_timeout_s": FETCH_TIMEOUT_S}
TURNS = Shape(
    Side("0", block_size=SMALLER, settings={"offer_ttl_s": OFFER_TTL_S}),
    Side("1", block_size=LARGER),
    turns=CONVERSATIONS,
)
"""Conversations: each server has an agent of each kind."""

TURNS_FAILING = Shape(
    Side("0", "hybrid", settings={"offer_ttl_s": OFFER_TTL_S}),
    Side("1", "hybrid"),
    policy="fail",
    keys=True,
    turns=CONVERSATIONS,
)
"""Conversations by signed tickets, with windows; what cannot be loaded fails."""
