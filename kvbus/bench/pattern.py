"""What a handoff must have brought: the pattern, found again in the decode engine's views.

Refuses to trust the planner: it looks at views and block ids alone.

Axes of a view: block, token, head, dim; axes of what is compared: block, word.
"""

import numpy as np
import torch

from kvbus.bench.shapes import Blocks
from kvbus.bench.words import WORD_BYTES, Words, words_at
from kvbus.engine import KvCache


def all_words(cache: KvCache) -> Words:
    """The whole segment of a cache."""
    region = cache.rank.regions[0]
    storage = cache.view(region.layers[0], region.parts[0]).untyped_storage()
    words: Words = torch.empty(0, dtype=torch.int64).set_(storage).numpy().view(np.uint64)
    return words


def wipe(cache: KvCache) -> None:
    """Zero a cache, so that old bytes cannot pass for new ones."""
    all_words(cache)[:] = 0


def arrived(cache: KvCache, source_blocks: Blocks, blocks: Blocks) -> bool:
    """Whether ``blocks`` hold what the pattern put into ``source_blocks`` of a cache like this."""
    return all(
        _view_arrived(cache.view(layer, part), source_blocks, blocks)
        for region in cache.rank.regions
        for layer in region.layers
        for part in region.parts
    )


def _view_arrived(view: torch.Tensor, source_blocks: Blocks, blocks: Blocks) -> bool:
    got = view[torch.from_numpy(blocks)].flatten(1).view(torch.int64).numpy().view(np.uint64)
    starts = view.storage_offset() + source_blocks * view.stride(0)
    first_words = starts * view.element_size() // WORD_BYTES
    return bool((got == words_at(first_words[:, None] + np.arange(got.shape[1]))).all())
