"""Caches, block tables and whole engines for the tests of the demo's model, without agents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from torch import Tensor

from kvbus.demo.blocks import Tables, decode_blocks, prefill_blocks
from kvbus.demo.messages import Step
from kvbus.demo.model import Generation, Transformer
from kvbus.demo.model_config import Attention, ModelConfig
from kvbus.demo.options import EngineShape
from kvbus.demo.paged_cache import PagedKV
from kvbus.demo.prompts import encode
from kvbus.geometry import BlockTable, GroupSpec, KvPart


def tables(config: ModelConfig, block_ids: Sequence[int]) -> Tables:
    """The same blocks in every group, from the first position on."""
    return dict.fromkeys(config.groups, BlockTable.of(block_ids))


def poisoned(kv: PagedKV) -> PagedKV:
    """The same cache filled with NaN, so that a read of a slot never written shows."""
    for parts in (parts for layers in kv.views for parts in layers.values()):
        for view in parts.values():
            view.fill_(math.nan)
    return kv


PROMPT = encode("Every byte of this prompt has a say in what comes after it, in every layer. " * 3)
PROMPT = PROMPT[:200]
NUM_STEPS = 4

KINDS = {
    "gqa": ModelConfig(),
    "six-heads": ModelConfig(kv_heads=6),
    "one-head": ModelConfig(kv_heads=1),
    "mla": ModelConfig(attention=Attention.MLA),
    "window": ModelConfig(window=40),
    "mla-window": ModelConfig(attention=Attention.MLA, window=17),
}


def last_step(
    generation: Generation, prompt: list[int], tokens_per_pass: int | None = None
) -> Step:
    """The first token of the output, after all passes of the prefill side."""
    *_, (_, step) = generation.prefill(prompt, tokens_per_pass)
    return step


@dataclass(frozen=True)
class CachedRequest:
    """A poisoned cache and the blocks that one request has in it."""

    model: Transformer
    groups: tuple[GroupSpec, ...]
    kv: PagedKV
    tables: dict[str, BlockTable]

    @classmethod
    def shuffled(
        cls, model: Transformer, *, shape: EngineShape, seed: int, tail_only: bool = False
    ) -> "CachedRequest":
        """With ``tail_only``, it has no blocks for what a window has left behind."""
        groups = model.config.spec("engine-0", block_size=shape.block_size).groups
        num_blocks = 5 + max(
            len(prefill_blocks(group, len(PROMPT) + NUM_STEPS)) for group in groups
        )
        kv = PagedKV.private(
            model.config,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            tp=shape.tp,
            pp=shape.pp,
        )
        random, tables = Random(seed), {}
        for group in groups:
            wanted = prefill_blocks(group, len(PROMPT) + NUM_STEPS)
            if tail_only:
                wanted = decode_blocks(group, len(PROMPT), NUM_STEPS)
            ids = random.sample(range(num_blocks), len(wanted))
            tables[group.name] = BlockTable.of(ids, first_block=wanted.start)
        return cls(model, groups, poisoned(kv), tables)

    def table(self, layer: int) -> BlockTable:
        return self.tables[self.model.config.group_of(layer)]

    def generation(self) -> Generation:
        return Generation(self.model, self.kv, self.tables)

    def prefill(self) -> Step:
        return last_step(self.generation(), PROMPT)

    def decode(self, first: Step) -> list[Step]:
        return self.generation().decode(first.token, len(PROMPT), NUM_STEPS)

    def view(self, layer: int, part: KvPart = KvPart.KEY) -> Tensor:
        """That of the first rank that has the layer."""
        return self.kv.ranks_of(layer)[0][part]
