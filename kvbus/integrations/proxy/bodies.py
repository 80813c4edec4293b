"""The bodies of the two steps, made from the client's body (pure).

Refuses to hand over what one ticket cannot carry: it names one sequence of one prompt.
"""

from collections.abc import Mapping
from typing import Any

Body = dict[str, Any]
Params = Mapping[str, Any]

PARAMS = "kv_transfer_params"
ASK_FOR_TICKET: Params = {"do_remote_decode": True}
ONLY_FOR_MANY_TOKENS = ("stream_options", "min_tokens")


def why_alone(body: Body) -> str | None:
    """Why a decode server must compute this prompt itself, or None when it need not."""
    if any(_more_than_one(body.get(key)) for key in ("n", "best_of")):
        return "several_sequences"
    if body.get("use_beam_search"):
        return "beam_search"
    if sum(_num_prompts(body.get(key)) for key in ("prompt", "prompt_embeds")) > 1:
        return "several_prompts"
    if body.get("echo") or body.get("prompt_logprobs") is not None:
        return "prompt_asked_back"
    return None


def one_token_body(body: Body, params: Params) -> Body:
    """The request that computes or loads the prompt, makes one token, and ends."""
    made = {key: value for key, value in body.items() if key not in ONLY_FOR_MANY_TOKENS}
    made |= {"max_tokens": 1, "stream": False, PARAMS: params}
    if "max_completion_tokens" in made:
        made["max_completion_tokens"] = 1
    return made


def decode_body(body: Body, params: Params | None) -> Body:
    """The client's request with ``params``; what it brought under that name is not trusted."""
    made = {key: value for key, value in body.items() if key != PARAMS}
    return made if params is None else made | {PARAMS: params}


def _more_than_one(count: object) -> bool:
    return isinstance(count, int) and count > 1


def _num_prompts(prompt: object) -> int:
    if prompt is None:
        return 0
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
