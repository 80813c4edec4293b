"""A conversation by both servers, turn by turn, as a router goes about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.vllm.clusters import FOR_DECODE, Cluster, prompt_of
from tests.vllm.servers import VllmServer

ANSWER = 24


@dataclass(frozen=True)
class Turn:
    """What was said, the answer included, and the params of the prefill request that goes on."""

    prompt: list[int]
    answer: list[int]
    params: dict[str, Any] | None

    @property
    def said(self) -> list[int]:
        return [*self.prompt, *self.answer]

    def then(self, num_tokens: int, seed: int) -> list[int]:
        """The prompt of the next turn."""
        return [*self.said, *prompt_of(num_tokens, seed)]


def turn(pair: Cluster, prompt: Sequence[int], params: Any = FOR_DECODE, **fields: Any) -> Turn:
    """One turn; ``params`` are those of the prefill request."""
    to_decode = pair.prefill.complete(prompt, 1, kv_transfer_params=params, **fields).params
    answer = pair.decode.complete(prompt, ANSWER, kv_transfer_params=to_decode, **fields)
    return Turn(list(prompt), answer.tokens, answer.params)


def last_turn(
    pair: Cluster, prompt: Sequence[int], params: Any = FOR_DECODE, **fields: Any
) -> list[int]:
    """The answer of a turn that is streamed, and so keeps nothing."""
    to_decode = pair.prefill.complete(prompt, 1, kv_transfer_params=params, **fields).params
    call = pair.decode.begin(prompt, ANSWER, kv_transfer_params=to_decode, stream=True, **fields)
    return list(call.stream())


def alone(pair: Cluster, prompt: Sequence[int]) -> list[int]:
    """The answer of decode that has read all of ``prompt`` itself."""
    return pair.decode.complete(prompt, ANSWER, cache_salt=f"alone-{hash(tuple(prompt))}").tokens


def computed(server: VllmServer) -> float:
    """Tokens of prompts that a server has computed itself, as it counts them."""
    return server.metric("prompt_tokens_by_source_total", source="local_compute")
