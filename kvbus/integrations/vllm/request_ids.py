"""What vLLM's request ids say: of which part of a client's request they are.

The prefill vLLM's id is that by which both agents know a request, made shorter if need be: routers
put host names into ids, and clients what they like; agents take 256 characters.
"""

import re
from hashlib import blake2b

MAX_CHARACTERS = 200
_KEPT_AT_AN_END = 80


def agents_id(request_id: str) -> str:
    """``request_id``, or both of its ends with a digest of all of it between them."""
    if len(request_id) <= MAX_CHARACTERS:
        return request_id
    digest = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{request_id[:_KEPT_AT_AN_END]}~{digest}~{request_id[-_KEPT_AT_AN_END:]}"


# vLLM makes a request of each prompt of a completion, `cmpl-NAME-INDEX-RANDOM`, and then of each
# sequence of a prompt, `SEQUENCE_cmpl-NAME-INDEX-RANDOM`. A chat has one prompt.
_SEQUENCE = re.compile(r"\d+_(?P<prompt>.+)", re.DOTALL)
_LATER_PROMPT = re.compile(r"(\d+_)?cmpl-.*-[1-9]\d*-[0-9a-f]{8}", re.DOTALL)


def is_of_later_prompt(request_id: str) -> bool:
    """Whether its prompt is not the first one of its completion.

    vLLM's answer to several prompts has the `kv_transfer_params` of the first one.
    """
    return _LATER_PROMPT.fullmatch(request_id) is not None


def is_later_sequence(request_id: str) -> bool:
    """Whether it is one of several sequences of a prompt, and not the first."""
    return prompt_of_sequence(request_id) is not None and not request_id.startswith("0_")


def prompt_of_sequence(request_id: str) -> str | None:
    """The id of the prompt of which several sequences are made, None for a prompt of one."""
    match = _SEQUENCE.fullmatch(request_id)
    return match["prompt"] if match is not None else None
