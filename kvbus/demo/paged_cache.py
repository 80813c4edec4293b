"""The demo engine's view of its paged KV cache: where token t of a request lives on each rank.

It only indexes tensors, however the memory is laid out and whoever owns it.

Axes
    block   blocks of the rank's cache, in any order
    slot    token slots of one block, ``block_size`` of them
    token   tokens of one request, by position
    head    KV heads that the rank holds, or, of the model, all of them
    dim     elements of one head of the cache
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbus.engine import KvCache
from kvbus.errors import GeometryError, LocalError
from kvbus.geometry import BlockTable, EngineSpec, KvLayout, held_heads
from kvbus.lab.engine import private_cache

LayerViews = Mapping[str, Tensor]
"""The parts of one layer on one rank, each [block, slot, head, dim] with any strides."""


@dataclass(frozen=True)
class PagedKV:
    """The KV cache of one engine: ``views[rank][layer][part]``.

    A rank has the layers of its pipeline stage; those of one stage follow each other. Views may lie
    anywhere and in any axis order. Values are cast to their dtype when written.
    """

    views: Sequence[Mapping[int, LayerViews]]

    @classmethod
    def of(cls, caches: Sequence[KvCache]) -> "PagedKV":
        """The views of these ranks' caches."""
        return cls(
            [
                {
                    layer: {part: cache.view(layer, part) for part in region.parts}
                    for region in cache.rank.regions
                    for layer in region.layers
                }
                for cache in caches
            ]
        )

    @classmethod
    def private(cls, spec: EngineSpec, num_blocks: int) -> "PagedKV":
        """A cache in memory of this process alone."""
        layout = KvLayout.parse("NHD")
        ranks = range(spec.num_ranks)
        return cls.of([private_cache(spec, rank, layout, num_blocks) for rank in ranks])

    def ranks_of(self, layer: int) -> Sequence[LayerViews]:
        """The views of ``layer``, by tensor parallel rank of the stage that holds it."""
        return [layers[layer] for layers in self.views if layer in layers]

    def write(self, layer: int, table: BlockTable, *, start: int, parts: LayerViews) -> None:
        """Gives each rank its heads of ``parts``, each [token, head, dim] of all heads."""
        ranks = self.ranks_of(layer)
        for rank, views in enumerate(ranks):
            for part, values in parts.items():
                heads = held_heads(rank, len(ranks), values.shape[1])
                at = slots(table, views[part], start, start + len(values))
                views[part][at] = values[:, heads.start : heads.stop].to(views[part].dtype)

    def read(
        self, layer: int, table: BlockTable, *, start: int, stop: int, num_heads: tuple[int, int]
    ) -> dict[str, Tensor]:
        """What each query head reads, each part contiguous [query_head, token, dim].

        ``num_heads`` are the model's query heads and KV heads. The same shapes for any tensor
        parallelism: what follows computes the same bits.
        """
        ranks = [
            {part: view[slots(table, view, start, stop)] for part, view in views.items()}
            for views in self.ranks_of(layer)
        ]
        readers = held_by_query_head(*num_heads, len(ranks))
        return {
            part: torch.stack([ranks[rank][part][:, head] for rank, head in readers])
            for part in ranks[0]
        }


def held_by_query_head(num_query_heads: int, num_kv_heads: int, tp: int) -> list[tuple[int, int]]:
    """Which copy of its KV head each query head reads: (rank, number among the rank's heads).

    Ranks that hold the same KV head share its query heads evenly, so that each copy is read.
    """
    if not 0 < tp <= num_query_heads:
        raise GeometryError(f"tp {tp} leaves ranks without a query head", tp=tp)
    copies: list[list[tuple[int, int]]] = [[] for _ in range(num_kv_heads)]
    for rank in range(tp):
        for number, head in enumerate(held_heads(rank, tp, num_kv_heads)):
            copies[head].append((rank, number))
    sharing = num_query_heads // num_kv_heads
    return [held[i * len(held) // sharing] for held in copies for i in range(sharing)]


def slots(table: BlockTable, view: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The block and the slot of each position, each [token]."""
    num_blocks, block_size = view.shape[:2]
    first, last = table.first_block, table.first_block + len(table)
    if start < first * block_size or stop > last * block_size:
        raise LocalError(
            f"blocks {first} to {last} of {block_size} do not hold tokens {start} to {stop}"
        )
    table.check_ids(num_blocks)
    positions = torch.arange(start, stop)
    ids = torch.from_numpy(table.array().astype("int64"))
    return ids[positions // block_size - first], positions % block_size
