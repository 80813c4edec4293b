"""Greedy generation with the demo's transformer, in the two halves that a handoff joins.

Each step carries a digest of its logits, which also shows an error that is too small to change the
greedy token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbus.demo.blocks import Tables
from kvbus.demo.messages import Step
from kvbus.demo.model import Transformer
from kvbus.demo.paged_cache import PagedKV
from kvbus.errors import LocalError
from kvbus.geometry import BlockTable, num_blocks_for


def encode(text: str) -> list[int]:
    """Tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


@dataclass(frozen=True)
class Generation:
    """One request: the model, and its blocks of a cache."""

    model: Transformer
    kv: PagedKV
    tables: Tables

    def prefill(
        self, prompt: Sequence[int], tokens_per_pass: int | None = None
    ) -> Iterator[tuple[int, Step]]:
        """The prefill side, pass by pass (chunked prefill), or, without a number, in one.

        Yields how many tokens are cached now, and the token after them: that of the last pass is
        the first of the output.
        """
        if not prompt:
            raise LocalError("a prompt of no tokens has nothing to hand off")
        stride = tokens_per_pass or len(prompt)
        for start in range(0, len(prompt), stride):
            tokens = prompt[start : start + stride]
            logits = self.model.prefill(tokens, self.kv, self.tables, start=start)
            yield start + len(tokens), Step.greedy(logits)

    def decode(self, token: int, position: int, num_steps: int = 1) -> list[Step]:
        """The decode side: goes on from the ``token`` at ``position``, and yields those after it.

        The cache holds what it attends to before it, and the blocks have room for what is new.
        """
        steps: list[Step] = []
        for i in range(num_steps):
            logits = self.model.decode_step(token, position + i, self.kv, self.tables)
            steps.append(Step.greedy(logits))
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
    tables = dict.fromkeys(model.config.groups, BlockTable.of(range(num_blocks)))
    alone = Generation(model, kv, tables)
    *_, (_, first) = alone.prefill(prompt, tokens_per_pass)
    return [first, *alone.decode(first.token, len(prompt), max_new_tokens - 1)]
