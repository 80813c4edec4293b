"""What a request's KV is of: its tokens, its LoRA, its images; the same on both sides of a handoff.

Refuses a prompt that is not the one whose KV a ticket opens. Prefill may leave out its last token.
"""

from typing import TYPE_CHECKING

from kvbus.errors import ProtocolError
from kvbus.integrations.vllm.transfer_params import HandoffParams, prompt_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request


def has_tokens(request: "Request") -> bool:
    """Whether the prompt is all tokens: embeddings in it are not named by anything."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def check_tokens(request: "Request") -> None:
    """Raise `ProtocolError` unless the prompt is all tokens."""
    if not has_tokens(request):
        raise ProtocolError("a prompt with embeddings is not handed off")


def check_prompt(request: "Request", handoff: HandoffParams) -> None:
    """Raise `ProtocolError` unless the prompt begins with the tokens of ``handoff``."""
    num_tokens = handoff.remote_num_tokens
    check_tokens(request)
    if num_tokens > request.num_prompt_tokens:
        raise ProtocolError(
            f"the KV is of {num_tokens} tokens, the prompt here has only "
            f"{request.num_prompt_tokens}: the router must send the ticket with the prompt, or the "
            "conversation, that it was made for"
        )
    if digest_of(request, num_tokens) != handoff.prompt_digest:
        raise ProtocolError(
            f"the first {num_tokens} tokens of the prompt, its LoRA or its images are not those "
            "that the KV is of: the router must send the ticket with the prompt, or the "
            "conversation, that it was made for"
        )


def digest_of_prompt(request: "Request") -> str:
    """That of all that the prefill engine computes, for the ticket; empty when there is none."""
    return digest_of(request, request.num_prompt_tokens) if has_tokens(request) else ""


def digest_of(request: "Request", num_tokens: int) -> str:
    """Of the first tokens, prompt and then answer, and of the images among them.

    What it takes grows with the prompt, and vLLM's scheduler waits: ask once for each request.
    """
    lora = request.lora_request
    conditions = [lora.lora_name if lora is not None else ""]
    conditions += [
        feature.identifier
        for feature in request.mm_features
        if feature.mm_position.offset < num_tokens
    ]
    return prompt_digest(request.all_token_ids[:num_tokens], conditions)


def leave_last_token(request: "Request") -> None:
    """Have the prefill engine compute all but the last token of the prompt.

    The decode engine computes that one in any case, for its logits. With a sliding window it needs
    a token for it that vLLM drops once the last one was computed, if it is the last of its block.
    """
    if request.num_prompt_tokens > 1 and has_tokens(request):
        del request.prompt_token_ids[-1]
        del request._all_token_ids[-1]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
