"""Caches and block tables for the tests of the demo's model, without agents."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbus.demo.model import Generation, Transformer
from kvbus.demo.model_config import Attention, ModelConfig
from kvbus.demo.paged_cache import PagedKV
from kvbus.geometry import BlockTable

SMALL = ModelConfig(head_dim=16, latent_dim=24, hidden=64, intermediate=96)
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mla": {"attention": Attention.MLA},
    "window": {"window": 20},
    "mla-window": {"attention": Attention.MLA, "window": 20},
}
PROMPT = list(b"Every byte of this prompt has a say in what comes after it, in every layer.")
NUM_STEPS = 4


def tables(model: Transformer, block_ids: Iterable[int]) -> dict[str, BlockTable]:
    """The same blocks in every group, from the first position on."""
    return dict.fromkeys(model.config.groups, BlockTable.of(list(block_ids)))


def poisoned(kv: PagedKV) -> PagedKV:
    """The same cache filled with NaN, so that a read of a slot never written shows."""
    for parts in (parts for layers in kv.views for parts in layers.values()):
        for view in parts.values():
            view.fill_(math.nan)
    return kv


@dataclass(frozen=True)
class CachedRequest:
    """A poisoned cache, and the blocks that one request has in it."""

    model: Transformer
    kv: PagedKV
    block_ids: Sequence[int]
    block_size: int

    @classmethod
    def of(
        cls, model: Transformer, block_ids: Sequence[int], block_size: int = 16, **shape: int
    ) -> "CachedRequest":
        num_blocks = max(block_ids) + 1
        kv = PagedKV.private(model.config, num_blocks=num_blocks, block_size=block_size, **shape)
        return cls(model, poisoned(kv), block_ids, block_size)

    @property
    def generation(self) -> Generation:
        return Generation(self.model, self.kv, tables(self.model, self.block_ids))

    def prefill(self, prompt: list[int], tokens_per_pass: int | None = None) -> Any:
        """The step of the first token, after all passes."""
        *_, (_, step) = self.generation.prefill(prompt, tokens_per_pass)
        return step

    def decode(self, first: Any, prompt: list[int]) -> list[Any]:
        return [*self.generation.decode(first.token, len(prompt), NUM_STEPS)]

    def generate(self, tokens_per_pass: int | None = None) -> list[Any]:
        first = self.prefill(PROMPT, tokens_per_pass)
        return [first, *self.decode(first, PROMPT)]
