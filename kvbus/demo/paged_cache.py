"""Owns the demo engine's view of its paged KV cache: where token t of a request lives on each rank.

Refuses to know how the memory is laid out, or whose it is: it only indexes tensors.

Axes
    block   blocks of the rank's cache, in any order
    slot    token slots of one block, ``block_size`` of them
    token   tokens of one request, by position
    head    KV heads that the rank holds, or, of the model, all of them
    dim     ``head_dim``
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbus.demo.model_config import ModelConfig
from kvbus.errors import GeometryError, LocalError
from kvbus.geometry import held_heads


@dataclass(frozen=True)
class HeldHead:
    """Where one KV head is held: on which rank, and as which of that rank's heads."""

    rank: int
    local_head: int


def held_head_of_each_query_head(config: ModelConfig, tp: int) -> list[HeldHead]:
    """Which copy of its KV head each query head reads; replicas share the query heads evenly."""
    if not 0 < tp <= config.num_query_heads:
        raise GeometryError(f"tp {tp} leaves ranks without a query head", tp=tp)
    holders: list[list[HeldHead]] = [[] for _ in range(config.num_kv_heads)]
    for rank in range(tp):
        for local_head, head in enumerate(held_heads(rank, tp, config.num_kv_heads)):
            holders[head].append(HeldHead(rank, local_head))
    sharing = config.query_heads_per_kv_head
    return [copies[i * len(copies) // sharing] for copies in holders for i in range(sharing)]


@dataclass(frozen=True)
class LayerViews:
    """K and V of one layer on one rank, each [block, slot, head, dim] with any strides."""

    k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        if self.k.dim() != 4 or self.k.shape != self.v.shape:
            raise GeometryError(
                "K and V must both be [block, slot, head, dim],"
                f" not {tuple(self.k.shape)} and {tuple(self.v.shape)}"
            )


@dataclass(frozen=True)
class PagedKV:
    """The KV cache of one engine: ``views[rank][layer]``.

    The views may lie anywhere (shared memory, one tensor of all layers) and in any axis order.
    Values are cast to their dtype when written.
    """

    views: Sequence[Sequence[LayerViews]]

    @classmethod
    def private(
        cls, config: ModelConfig, *, num_blocks: int, block_size: int, tp: int = 1
    ) -> "PagedKV":
        """A cache in memory of its own: a tensor for each rank, layer, and K or V."""

        def layer_views(rank: int) -> LayerViews:
            num_heads = len(held_heads(rank, tp, config.num_kv_heads))
            shape = (num_blocks, block_size, num_heads, config.head_dim)
            return LayerViews(*(torch.zeros(shape, dtype=config.kv_dtype) for _ in "kv"))

        return cls([[layer_views(rank) for _ in range(config.num_layers)] for rank in range(tp)])

    @property
    def tp(self) -> int:
        """The number of ranks."""
        return len(self.views)

    @property
    def num_blocks(self) -> int:
        """The number of blocks, the same on every rank."""
        return self.views[0][0].k.shape[0]

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self.views[0][0].k.shape[1]

    def write(
        self, rank: int, layer: int, *, block_ids: Sequence[int], start: int, k: Tensor, v: Tensor
    ) -> None:
        """Stores K and V, each [token, head, dim] of the rank's heads, from position ``start``."""
        views = self.views[rank][layer]
        if k.shape != v.shape or k.shape[1:] != views.k.shape[2:]:
            raise GeometryError(
                f"K {tuple(k.shape)} and V {tuple(v.shape)} do not fit rank {rank}'s"
                f" [head, dim] {tuple(views.k.shape[2:])}"
            )
        at = self._slots(block_ids, start, start + k.shape[0])
        views.k[at] = k.to(views.k.dtype)
        views.v[at] = v.to(views.v.dtype)

    def gather(
        self, rank: int, layer: int, *, block_ids: Sequence[int], num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Copies of K and V, each [token, head, dim], of positions 0 to ``num_tokens``."""
        at = self._slots(block_ids, 0, num_tokens)
        views = self.views[rank][layer]
        return views.k[at], views.v[at]

    def _slots(self, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The block and the slot of each position, each [token]."""
        if stop > len(block_ids) * self.block_size:
            raise LocalError(
                f"{len(block_ids)} blocks of {self.block_size} do not hold {stop} tokens"
            )
        if min(block_ids) < 0 or max(block_ids) >= self.num_blocks:
            raise LocalError(f"a block id of {list(block_ids)} is not in 0..{self.num_blocks - 1}")
        positions = torch.arange(start, stop)
        return torch.tensor(block_ids)[positions // self.block_size], positions % self.block_size
