"""A link that changes blocks in the callback that releases them: a later write or read shows.

Blocks of an ended offer change immediately. Free blocks of a failed fetch must not change again;
the link changes them first if it ``overwrites``. ``caches`` are the engine's. Axes of a view:
block, token (of a block), head, dim.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbus.engine import Fetch, KvCache, Link, Offer
from kvbus.protocol import Outcome

BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(view: Tensor) -> Tensor:
    """The same memory as integers of the same size."""
    return view.view(BIT_TYPES[view.itemsize])


def change_blocks(caches: Sequence[KvCache], group: str, block_ids: Any) -> None:
    """Make every number in these blocks another one; replicas of a head stay equal."""
    ids = torch.as_tensor(block_ids, dtype=torch.int64)
    for cache in caches:
        for view in _views(cache, group):
            view[ids] += 1


@dataclass
class FreeBlocks:
    """The content of a rank's blocks of a fetch at their release, by view."""

    cache: KvCache
    group: str
    ids: Tensor
    content: list[Tensor]

    def without(self, ids: Tensor) -> "FreeBlocks":
        kept = ~torch.isin(self.ids, ids)
        content = [one[kept] for one in self.content]
        return FreeBlocks(self.cache, self.group, self.ids[kept], content)


class StrictLink(Link):
    """Changes the blocks of an ended offer, unless another offer has them.

    It remembers the content of free blocks of failed fetches until another fetch gets them.
    """

    def __init__(self, *args: Any, caches: Sequence[KvCache] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self.caches = caches
        self.overwrites = False
        self._offered: dict[Offer, set[tuple[str, int]]] = {}
        self.free_blocks: list[FreeBlocks] = []

    def offer(self, request_id: str, *, block_ids: Any, **more: Any) -> Offer:
        offer = super().offer(request_id, block_ids=block_ids, **more)
        self._offered[offer] = _pairs(block_ids)
        extend = offer.extend

        def extend_and_note(num_tokens: int, block_ids: Any = None, **more: Any) -> Any:
            done = extend(num_tokens, block_ids, **more)
            added = _pairs(block_ids or {})

            def note() -> None:
                if done.exception() is None and offer in self._offered:
                    self._offered[offer] |= added

            done.then(note)
            return done

        offer.extend = extend_and_note  # type: ignore[method-assign] # of this offer alone
        offer.ended.then(partial(self._overwrite, offer))
        return offer

    def fetch(self, ticket: Any, *, block_ids: Any, **more: Any) -> Fetch:
        fetch = super().fetch(ticket, block_ids=block_ids, **more)
        tables = {name: torch.as_tensor(ids).long() for name, ids in block_ids.items()}
        for group, ids in tables.items():
            self.free_blocks[:] = [
                one.without(ids) if one.group == group else one for one in self.free_blocks
            ]
        fetch.freed.then(partial(self._remember, fetch, tables))
        return fetch

    def check_at_end(self) -> None:
        self.check_free_blocks()
        self.caches = ()

    def check_free_blocks(self) -> None:
        """Fail if anything has landed in a block since it was free; lost ranks do not count."""
        for free in self.free_blocks:
            if not any(cache is free.cache for cache in self.caches):
                continue
            for before, view in zip(free.content, _views(free.cache, free.group), strict=True):
                assert torch.equal(view[free.ids], before), f"bytes landed in free {free.group}"

    def _overwrite(self, offer: Offer) -> None:
        ended = self._offered.pop(offer)
        if not offer.offer_id:
            return  # no agent had it
        ended -= {pair for pairs in self._offered.values() for pair in pairs}
        for group in {group for group, _ in ended}:
            change_blocks(self.caches, group, [block for name, block in ended if name == group])

    def _remember(self, fetch: Fetch, tables: Mapping[str, Tensor]) -> None:
        ended = fetch.notice
        if ended is not None and (ended.outcome is Outcome.COMPLETED or ended.stage == "requested"):
            return  # the blocks are the request's now, or were never given
        if self.overwrites:
            for group, ids in tables.items():
                change_blocks(self.caches, group, ids)
        for cache in self.caches:
            for group, ids in tables.items():
                content = [view[ids] for view in _views(cache, group)]
                self.free_blocks.append(FreeBlocks(cache, group, ids, content))


def _pairs(block_ids: Mapping[str, Any]) -> set[tuple[str, int]]:
    return {(group, int(at)) for group, ids in block_ids.items() for at in ids}


def _views(cache: KvCache, group: str) -> Iterator[Tensor]:
    for region in cache.rank.regions:
        for layer in region.layers if region.group == group else ():
            yield from (bits(cache.view(layer, part)) for part in region.parts)
