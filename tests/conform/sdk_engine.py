"""An engine on the blocking sessions of kvbus's SDK, of both roles: one loop, as a scheduler has.

It is the engine that docs/conformance.md wants, and its sessions find an agent that comes back.
"""

import json
import os
import select
import time
from contextlib import ExitStack
from typing import Any

from kvbus.engine import BlockingDecode, BlockingMemory, BlockingPrefill, Fetch, Offer
from kvbus.errors import PeerLost, RequestRefused
from kvbus.geometry import KvLayout
from kvbus.protocol import Fetched, Outcome
from tests.conform.sdk_cache import NUM_BLOCKS, SPEC, Blocks, Cache, first_block, positions_of, tell

ATTACH, ROLE = os.environ["KVBUS_ATTACH"], os.environ["KVBUS_ROLE"]
OPTIONS: Any = {"attach_timeout_s": 30.0, "reconnect": True}
TICK_S, AGAIN_S = 0.01, 0.5


class Prefill:
    def __init__(self, session: BlockingPrefill, cache: Cache) -> None:
        self.session, self.cache = session, cache
        self.offers: dict[int, tuple[Offer, Blocks]] = {}

    def do_offer(self, name: int, rest: str) -> None:
        first, *later = [int(count) for count in rest.split()]
        spans, blocks = positions_of(0, first, whole=bool(later)), Blocks()
        self.cache.grow(blocks, spans)
        self.cache.fill(name, blocks, spans)
        firsts = {group: first_block(group, start) for group, (start, _) in spans.items()}
        try:
            offer = self.offer(str(name), first, blocks, firsts, sealed=not later)
        except RequestRefused as error:
            tell("refused", name, error.code.value)
            self.cache.give_back(blocks)
            return
        self.offers[name] = offer, blocks
        tell("ticket", name, json.dumps(offer.ticket))
        for count in later:
            spans = positions_of(0, count, whole=True)
            new = self.cache.grow(blocks, spans)
            self.cache.fill(name, blocks, spans)
            self.session.extend(offer, count, {group: ids for group, ids in new.items() if ids})
        if later:
            self.session.seal(offer)

    def offer(
        self, name: str, num_tokens: int, blocks: Blocks, firsts: dict[str, int], *, sealed: bool
    ) -> Offer:
        """Ask until the agent is there."""
        while True:
            try:
                return self.session.offer(
                    name,
                    num_tokens=num_tokens,
                    block_ids=blocks,
                    sealed=sealed,
                    first_blocks=firsts,
                )
            except PeerLost:
                time.sleep(TICK_S)

    def do_withdraw(self, name: int, _: str) -> None:
        self.session.withdraw(self.offers[name][0])

    def take(self) -> None:
        for released in self.session.take_released():
            name = int(released.request_id)
            tell("released", name, released.outcome.value)
            self.cache.give_back(self.offers.pop(name)[1])


class Decode:
    def __init__(self, session: BlockingDecode, cache: Cache) -> None:
        self.session, self.cache = session, cache
        self.fetches: dict[str, tuple[int, str, Fetch, Blocks]] = {}
        self.later: list[tuple[float, int, str]] = []

    def do_fetch(self, name: int, rest: str) -> None:
        first, last, ticket = rest.split(" ", 2)
        spans, blocks = positions_of(int(first), int(last)), Blocks()
        self.cache.grow(blocks, spans)
        wanted: Any = {"num_tokens": int(last), "block_ids": blocks, "first_token": int(first)}
        try:
            fetch = self.session.fetch(json.loads(ticket), **wanted)
        except PeerLost:  # the next agent is not there yet
            self.cache.give_back(blocks)
            self.later.append((time.monotonic() + TICK_S, name, rest))
            return
        self.fetches[fetch.fetch_id] = name, rest, fetch, blocks

    def do_cancel(self, name: int, _: str) -> None:
        self.session.cancel(next(fetch for n, _, fetch, _ in self.fetches.values() if n == name))

    def take(self) -> None:
        for ended in self.session.take_ended():
            name, rest, _, blocks = self.fetches[ended.fetch_id]
            if isinstance(ended, Fetched):
                self.tell_end(name, rest, ended, blocks)
            if not isinstance(ended, Fetched) or ended.blocks_free:
                self.cache.give_back(self.fetches.pop(ended.fetch_id)[3])
        due = [one for one in self.later if time.monotonic() >= one[0]]
        self.later = [one for one in self.later if one not in due]
        for _, name, rest in due:
            self.do_fetch(name, rest)

    def tell_end(self, name: int, rest: str, ended: Fetched, blocks: Blocks) -> None:
        first, last, _ = rest.split(" ", 2)
        if ended.outcome is Outcome.COMPLETED:
            spans = positions_of(int(first), int(last))
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
    with ExitStack() as stack:
        ranks = []
        for rank in range(SPEC.tp_size):
            memory = stack.enter_context(BlockingMemory(ATTACH, SPEC, rank, **OPTIONS))
            ranks.append(memory.allocate(KvLayout.parse("HND"), num_blocks=NUM_BLOCKS))
        if ROLE == "prefill":
            prefill = stack.enter_context(BlockingPrefill(ATTACH, SPEC, **OPTIONS))
            prefill.register()
            run(Prefill(prefill, Cache(ranks)))
        else:
            decode = stack.enter_context(BlockingDecode(ATTACH, SPEC, **OPTIONS))
            decode.register()
            run(Decode(decode, Cache(ranks)))


if __name__ == "__main__":
    main()
