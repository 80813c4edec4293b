"""Owns greedy generation with the demo's transformer, in the two halves that a handoff joins.

Refuses to compare by tokens alone: each step carries a digest of its logits, which also shows an
error that is too small to change the greedy token.
"""

from collections.abc import Sequence

from kvbus.demo.block_allocator import BlockAllocator
from kvbus.demo.model import Transformer
from kvbus.demo.paged_cache import PagedKV
from kvbus.demo.step import Step
from kvbus.errors import LocalError
from kvbus.geometry import num_blocks_for


def encode(text: str) -> list[int]:
    """Tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def prefill_prompt(
    model: Transformer,
    kv: PagedKV,
    block_ids: Sequence[int],
    *,
    prompt: Sequence[int],
    tokens_per_pass: int | None = None,
) -> Step:
    """The prefill side: caches K and V of the whole prompt and yields the first output token.

    With ``tokens_per_pass`` it takes the prompt in several passes (chunked prefill).
    """
    if not prompt:
        raise LocalError("a prompt of no tokens has nothing to hand off")
    stride = tokens_per_pass or len(prompt)
    for start in range(0, len(prompt), stride):
        logits = model.prefill(prompt[start : start + stride], kv, block_ids, start=start)
    return Step.greedy(logits)


def decode(
    model: Transformer,
    kv: PagedKV,
    block_ids: Sequence[int],
    *,
    first_token: int,
    position: int,
    num_steps: int,
) -> list[Step]:
    """The decode side: goes on from the prefill side's token, and yields those after it.

    ``position`` is that token's: the prompt's length. The cache holds K and V of all positions
    before it, and the blocks have room for ``num_steps`` more.
    """
    steps: list[Step] = []
    token = first_token
    for i in range(num_steps):
        steps.append(Step.greedy(model.decode_step(token, position + i, kv, block_ids)))
        token = steps[-1].token
    return steps


def generate_alone(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    block_size: int = 16,
    tokens_per_pass: int | None = None,
) -> list[Step]:
    """The reference: one engine does both halves in a cache of its own. At least one token.

    Equal to a handed-off run when ``tokens_per_pass`` is that of its prefill side; with another
    one, sums are taken in another order, which in rare cases changes a digest.
    """
    num_blocks = num_blocks_for(len(prompt) + max_new_tokens, block_size)
    kv = PagedKV.private(model.config, num_blocks=num_blocks, block_size=block_size)
    block_ids = BlockAllocator(num_blocks).allocate(num_blocks)
    first = prefill_prompt(model, kv, block_ids, prompt=prompt, tokens_per_pass=tokens_per_pass)
    rest = decode(
        model,
        kv,
        block_ids,
        first_token=first.token,
        position=len(prompt),
        num_steps=max_new_tokens - 1,
    )
    return [first, *rest]
