"""Control sessions of engines that take their agent at its word, in the callback that brings it.

An offer that is released has its blocks changed at once, so that a release that comes too early
makes wrong bytes. Free blocks of a fetch that failed must not change again, once the engine has
changed them if it ``overwrites``. ``caches`` are the engine's, once it has them. Axes of a view:
block, token (of a block), head, dim.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbus.engine import DecodeSession, Fetch, KvCache, Offer, PrefillSession
from kvbus.errors import KVBusError
from kvbus.protocol import ExtendOffer, MakeOffer, Outcome

BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(view: Tensor) -> Tensor:
    """The same memory as integers of the same size."""
    return view.view(BIT_TYPES[view.itemsize])


class OverwritingPrefill(PrefillSession):
    """Changes the blocks of an offer as soon as they are the engine's again.

    As any engine does, it keeps a block that another offer of it still has.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.caches: Sequence[KvCache] = ()
        self._offered: dict[str, list[Mapping[str, Any]]] = {}

    def make(self, offer: Offer) -> Offer:
        def note() -> None:
            self._offered[offer.offer_id] = [_blocks_of(offer.message)]
            offer.ended.then(partial(self._overwrite, offer.offer_id))

        offer.made.then(lambda: note() if offer.offer_id else None)
        return super().make(offer)

    def send(
        self, message: Any, on_reply: Callable[[Any], None], *, timeout_s: float = 0.0
    ) -> None:
        def reply(answer: Any) -> None:
            is_good = isinstance(message, ExtendOffer) and not isinstance(answer, KVBusError)
            if is_good and message.offer_id in self._offered:
                self._offered[message.offer_id].append(_blocks_of(message))
            on_reply(answer)

        super().send(message, reply, timeout_s=timeout_s)

    def _overwrite(self, offer_id: str) -> None:
        ended, still = self._blocks_of(self._offered.pop(offer_id)), set()
        for tables in self._offered.values():
            still |= self._blocks_of(tables)
        for group in {group for group, _ in ended - still}:
            ids = [block for name, block in ended - still if name == group]
            change_blocks(self.caches, group, ids)

    def _blocks_of(self, tables: Sequence[Mapping[str, Any]]) -> set[tuple[str, int]]:
        return {(group, int(at)) for table in tables for group in table for at in table[group]}


def _blocks_of(message: MakeOffer | ExtendOffer) -> Mapping[str, Any]:
    return {group: table.array() for group, table in message.tables.items()}


def change_blocks(caches: Sequence[KvCache], group: str, block_ids: Any) -> None:
    """Make every number in these blocks another one; replicas of a head stay equal."""
    ids = torch.as_tensor(block_ids, dtype=torch.int64)
    for cache in caches:
        for view in _views(cache, group):
            view[ids] += 1


def overwrite_once_released(
    offer: Offer, cache: KvCache, block_ids: Mapping[str, Sequence[int]]
) -> None:
    """As an `OverwritingPrefill` does, for an offer of a `Link`."""
    for group, ids in block_ids.items():
        offer.ended.then(partial(change_blocks, [cache], group, ids))


@dataclass
class FreeBlocks:
    """What was in a rank's blocks of a fetch when they came back; ``content`` is by view."""

    cache: KvCache
    group: str
    ids: Tensor
    content: list[Tensor]

    def without(self, ids: Tensor) -> "FreeBlocks":
        kept = ~torch.isin(self.ids, ids)
        content = [one[kept] for one in self.content]
        return FreeBlocks(self.cache, self.group, self.ids[kept], content)


class WatchingDecode(DecodeSession):
    """Remembers what is in the free blocks of failed fetches, until another fetch gets them."""

    def __init__(
        self, *args: Any, free_blocks: "list[FreeBlocks] | None" = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.caches: Sequence[KvCache] = ()
        self.overwrites = False
        self._free_blocks = [] if free_blocks is None else free_blocks
        """Shared with the next session of an engine that keeps its memory."""

    def begin(self, fetch: Fetch) -> None:
        super().begin(fetch)
        block_ids = {group: table.array().tolist() for group, table in fetch.message.tables.items()}
        tables = {group: torch.as_tensor(ids).long() for group, ids in block_ids.items()}
        for group, ids in tables.items():
            self._free_blocks[:] = [
                one.without(ids) if one.group == group else one for one in self._free_blocks
            ]
        fetch.freed.add_callback(partial(self._remember, fetch, tables))

    def check_free_blocks(self) -> None:
        """Fail if anything has landed in a block since it was free; lost ranks do not count."""
        for free in self._free_blocks:
            if not any(cache is free.cache for cache in self.caches):
                continue
            for before, view in zip(free.content, _views(free.cache, free.group), strict=True):
                assert torch.equal(view[free.ids], before), f"bytes landed in free {free.group}"

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
                self._free_blocks.append(FreeBlocks(cache, group, ids, content))


def strict(kind: type[PrefillSession] | type[DecodeSession]) -> Any:
    """The strict kind of this kind of session."""
    return OverwritingPrefill if issubclass(kind, PrefillSession) else WatchingDecode


def _views(cache: KvCache, group: str) -> Iterator[Tensor]:
    for region in cache.rank.regions:
        for layer in region.layers if region.group == group else ():
            yield from (bits(cache.view(layer, part)) for part in region.parts)
