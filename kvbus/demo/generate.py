"""Owns greedy generation with the demo's transformer, in the two halves that a handoff joins.

Refuses to compare by tokens alone: each step carries a digest of its logits, which also shows an
error that is too small to change the greedy token.
"""

from collections.abc import Iterator, Sequence

from kvbus.demo.block_allocator import BlockAllocator
from kvbus.demo.model import Transformer
from kvbus.demo.paged_cache import PagedKV, Tables
from kvbus.demo.step import Step
from kvbus.errors import LocalError
from kvbus.geometry import BlockTable, num_blocks_for


def encode(text: str) -> list[int]:
    """Tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def prefill_passes(
    model: Transformer,
    kv: PagedKV,
    tables: Tables,
    *,
    prompt: Sequence[int],
    tokens_per_pass: int | None = None,
) -> Iterator[tuple[int, Step]]:
    """The prefill side, pass by pass (chunked prefill), or, without ``tokens_per_pass``, in one.

    Yields how many tokens are cached now, and the token after them: that of the last pass is the
    first of the output.
    """
    if not prompt:
        raise LocalError("a prompt of no tokens has nothing to hand off")
    stride = tokens_per_pass or len(prompt)
    for start in range(0, len(prompt), stride):
        tokens = prompt[start : start + stride]
        logits = model.prefill(tokens, kv, tables, start=start)
        yield start + len(tokens), Step.greedy(logits)


def prefill_prompt(
    model: Transformer,
    kv: PagedKV,
    tables: Tables,
    *,
    prompt: Sequence[int],
    tokens_per_pass: int | None = None,
) -> Step:
    """All passes of the prefill side; returns the first token of the output."""
    passes = prefill_passes(model, kv, tables, prompt=prompt, tokens_per_pass=tokens_per_pass)
    *_, (_, step) = passes
    return step


def decode(
    model: Transformer,
    kv: PagedKV,
    tables: Tables,
    *,
    first_token: int,
    position: int,
    num_steps: int,
) -> list[Step]:
    """The decode side: goes on from the prefill side's token, and yields those after it.

    ``position`` is that token's: the prompt's length. The cache holds what it attends to before
    it, and the blocks have room for ``num_steps`` more.
    """
    steps: list[Step] = []
    token = first_token
    for i in range(num_steps):
        steps.append(Step.greedy(model.decode_step(token, position + i, kv, tables)))
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
    table = BlockTable.of(BlockAllocator(num_blocks).allocate(num_blocks))
    tables = dict.fromkeys(model.config.groups, table)
    first = prefill_prompt(model, kv, tables, prompt=prompt, tokens_per_pass=tokens_per_pass)
    rest = decode(
        model,
        kv,
        tables,
        first_token=first.token,
        position=len(prompt),
        num_steps=max_new_tokens - 1,
    )
    return [first, *rest]
