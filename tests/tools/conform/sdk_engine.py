"""The engine of docs/conformance.md on a link of kvbus's SDK: one loop, as a scheduler has.

`test_engines` plants flaws in its use of the SDK.
"""

import json
import os
import select
import time
from collections import deque
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvbus.engine import Fetch, KvCache, Link, Offer, RankMemory
from kvbus.errors import ErrorCode, PeerLost, RequestRefused
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, StatePart, num_blocks_for, state_group
from kvbus.protocol import Fetched, Outcome

ATTACH, ROLE = os.environ["KVBUS_ATTACH"], os.environ["KVBUS_ROLE"]
OPTIONS: Any = {"attach_timeout_s": 30.0, "agent_wait_s": 0.0}
TICK_S = 0.01
NUM_BLOCKS, BLOCK_SIZE, HEADS = 24, 16, 4
FULL = GroupSpec("full", (0, 2), BLOCK_SIZE, HEADS, 8, "bfloat16")
TAIL = GroupSpec("tail", (1,), BLOCK_SIZE, HEADS, 8, "bfloat16", window=24)
STATE = state_group("state", (3,), (StatePart("conv", HEADS, 6), StatePart("ssm", 2, 10)))
SPEC = EngineSpec("sdk", "m", 2, (FULL, TAIL, STATE))
Blocks = dict[str, list[int]]
Spans = dict[str, tuple[int, int]]


def tell(*words: object) -> None:
    print(*words, flush=True)


def spans_of(first_token: int, num_tokens: int, *, whole: bool = False) -> Spans:
    """Positions of each group; with ``whole`` all, also of one with a window."""
    return {
        group.name: (0, num_tokens)
        if whole and not group.state
        else group.positions(first_token, num_tokens)
        for group in SPEC.groups
    }


class Cache:
    """The ranks' memory, the known numbers in it, and the blocks that are free."""

    def __init__(self, ranks: list[KvCache]) -> None:
        self.ranks = ranks
        self.free = {group.name: deque(range(NUM_BLOCKS)) for group in SPEC.groups}

    def grow(self, blocks: Blocks, spans: Spans) -> Blocks:
        """Lengthen tables until they hold these positions; returns the new blocks only."""
        new = {}
        for group, (start, stop) in spans.items():
            table = blocks.setdefault(group, [])
            size = SPEC.group(group).block_size
            wanted = num_blocks_for(stop, size) - start // size if stop > start else 0
            new[group] = [self.free[group].popleft() for _ in range(wanted - len(table))]
            table += new[group]
        return new

    def give_back(self, blocks: Blocks) -> None:
        for group, ids in blocks.items():
            self.free[group].extendleft(ids)

    def fill(self, name: int, blocks: Blocks, spans: Spans) -> None:
        for view, at, numbers in self._rows(name, blocks, spans):
            view[at] = numbers

    def num_wrong(self, name: int, blocks: Blocks, spans: Spans) -> int:
        rows = self._rows(name, blocks, spans)
        return sum(int((view[at] != numbers).sum()) for view, at, numbers in rows)

    def _rows(self, name: int, blocks: Blocks, spans: Spans) -> Iterator[tuple[Tensor, Any, Any]]:
        """A view, where in it KV lies, and its known numbers [position, head, byte]."""
        for group in SPEC.groups:
            start, stop = spans[group.name]
            if start == stop:
                continue
            table, positions = torch.tensor(blocks[group.name]), torch.arange(start, stop)
            size = group.block_size
            at = table[positions // size - start // size], positions % size
            for rank, cache in enumerate(self.ranks):
                for layer, (number, part) in product(group.layers, enumerate(group.parts)):
                    view = cache.view(layer, part).view(torch.uint8)
                    held, row_bytes = view.shape[2:]
                    heads = torch.arange(rank * held, (rank + 1) * held)
                    known = 101 * name + 59 * layer + 37 * number + 3 * torch.arange(row_bytes)
                    known = known + 7 * positions[:, None, None] + 23 * heads[:, None]
                    yield view, at, (known % 251).to(torch.uint8)


class Prefill:
    def __init__(self, link: Link, cache: Cache) -> None:
        self.link, self.cache = link, cache
        self.offers: dict[int, tuple[Offer, Blocks]] = {}

    def do_offer(self, name: int, rest: str) -> None:
        first, *later = [int(count) for count in rest.split()]
        spans, blocks = spans_of(0, first, whole=bool(later)), Blocks()
        self.cache.grow(blocks, spans)
        self.cache.fill(name, blocks, spans)
        try:
            offer = self.offer(str(name), first, blocks, spans, sealed=not later)
        except RequestRefused as error:
            tell("refused", name, error.code.value)
            self.cache.give_back(blocks)
            return
        self.offers[name] = offer, blocks
        tell("ticket", name, json.dumps(offer.ticket))
        for count in later:
            spans = spans_of(0, count, whole=True)
            new = self.cache.grow(blocks, spans)
            self.cache.fill(name, blocks, spans)
            offer.extend(count, {group: ids for group, ids in new.items() if ids})
        if later:
            offer.seal()

    def offer(
        self, name: str, num_tokens: int, blocks: Blocks, spans: Spans, *, sealed: bool
    ) -> Offer:
        firsts = {one: start // SPEC.group(one).block_size for one, (start, _) in spans.items()}
        wanted: Any = {"block_ids": blocks, "first_blocks": firsts, "sealed": sealed}
        while True:
            try:
                offer = self.link.offer(name, num_tokens=num_tokens, **wanted)
                offer.made.wait()
            except PeerLost:
                time.sleep(TICK_S)
            else:
                return offer

    def do_withdraw(self, name: int, _: str) -> None:
        self.offers[name][0].withdraw()

    def take(self) -> None:
        for offer in self.link.ended():
            name = int(offer.request_id) if isinstance(offer, Offer) else -1
            if name in self.offers and self.offers[name][0] is offer:
                outcome = offer.outcome if isinstance(offer, Offer) else None
                tell("released", name, (outcome or Outcome.FAILED).value)
                self.cache.give_back(self.offers.pop(name)[1])


class Decode:
    def __init__(self, link: Link, cache: Cache) -> None:
        self.link, self.cache = link, cache
        self.fetches: dict[Fetch, tuple[int, Spans, Blocks, str]] = {}
        self.told: set[Fetch] = set()
        self.later: list[tuple[int, str]] = []

    def do_fetch(self, name: int, rest: str) -> None:
        first, last, ticket = rest.split(" ", 2)
        spans, blocks = spans_of(int(first), int(last)), Blocks()
        self.cache.grow(blocks, spans)
        wanted: Any = {"num_tokens": int(last), "block_ids": blocks, "first_token": int(first)}
        fetch = self.link.fetch(json.loads(ticket), **wanted)
        self.fetches[fetch] = name, spans, blocks, rest

    def do_cancel(self, name: int, _: str) -> None:
        next(fetch for fetch, (number, *_) in self.fetches.items() if number == name).cancel()

    def take(self) -> None:
        later, self.later = self.later, []
        for name, rest in later:
            self.do_fetch(name, rest)
        for fetch in self.link.ended():
            if not isinstance(fetch, Fetch) or not fetch.notice or fetch not in self.fetches:
                continue
            name, spans, blocks, rest = self.fetches[fetch]
            if fetch.notice.stage == "requested" and fetch.notice.code == ErrorCode.PEER_LOST:
                self.later.append((name, rest))  # the next agent is not there yet
            elif fetch not in self.told:
                self.tell_end(name, fetch.notice, blocks, spans)
                self.told.add(fetch)
            if fetch.are_blocks_free:
                self.cache.give_back(self.fetches.pop(fetch)[2])
                self.told.discard(fetch)

    def tell_end(self, name: int, ended: Fetched, blocks: Blocks, spans: Spans) -> None:
        if ended.outcome is Outcome.COMPLETED:
            tell("fetched", name, "completed", self.cache.num_wrong(name, blocks, spans))
        elif ended.stage == "requested":
            tell("refused", name, ended.code)
        else:
            tell("fetched", name, ended.outcome.value)


def run(engine: Prefill | Decode) -> None:
    """Do what the lines say, and take what has ended, until the last line."""
    rest = b""
    while True:
        if select.select([0], [], [], TICK_S)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                word, name, *words = line.decode().split(" ", 2)
                getattr(engine, f"do_{word}")(int(name), *words or [""])
        engine.take()


def main() -> None:
    memories = [
        RankMemory.allocate(SPEC, rank, KvLayout.parse("HND"), num_blocks=NUM_BLOCKS)
        for rank in range(SPEC.tp_size)
    ]
    cache = Cache([KvCache(SPEC, memory.rank, memory.tensor) for memory in memories])
    with Link(ATTACH, SPEC, memory=memories, **OPTIONS) as link:
        run(Prefill(link, cache) if ROLE == "prefill" else Decode(link, cache))


if __name__ == "__main__":
    main()
