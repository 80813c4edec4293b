"""An engine on kvbus's own SDK, of both roles, as docs/conformance.md wants one."""

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from itertools import product
from typing import Any, NamedTuple

import torch

from kvbus.engine import DecodeSession, Fetch, KvCache, MemorySession, Offer, PrefillSession
from kvbus.engine.session import ControlSession
from kvbus.errors import ErrorCode, FetchFailed, KVBusError, PeerLost, RequestRefused
from kvbus.geometry import (
    EngineSpec,
    GroupSpec,
    KvLayout,
    StatePart,
    num_blocks_for,
    state_group,
)

NUM_BLOCKS, BLOCK_SIZE, HEADS = 24, 16, 4
FULL = GroupSpec("full", (0, 2), BLOCK_SIZE, HEADS, 8, "bfloat16")
TAIL = GroupSpec("tail", (1,), BLOCK_SIZE, HEADS, 8, "bfloat16", window=24)
STATE = state_group("state", (3,), (StatePart("conv", HEADS, 6), StatePart("ssm", 2, 10)))
SPEC = EngineSpec("sdk", "m", 2, (FULL, TAIL, STATE))
Blocks = dict[str, list[int]]
Spans = dict[str, tuple[int, int]]


def tell(*words: object) -> None:
    print(*words, flush=True)


class Rows(NamedTuple):
    """Rows of one layer and part: of these positions and heads, or of the units of a state."""

    layer: int
    part: int
    positions: range
    heads: range
    row_bytes: int


def numbers(name: int, rows: Rows) -> torch.Tensor:
    """The known numbers, [position, head, byte]."""
    base = 101 * name + 59 * rows.layer + 37 * rows.part + 3 * torch.arange(rows.row_bytes)
    at = torch.tensor(rows.positions)[:, None, None], torch.tensor(rows.heads)[:, None]
    return ((base + 7 * at[0] + 23 * at[1]) % 251).to(torch.uint8)


def positions_of(first_token: int, num_tokens: int, *, whole: bool = False) -> Spans:
    """Positions of each group; with ``whole`` all, also of one with a window."""
    return {
        group.name: (0, num_tokens)
        if whole and not group.state
        else group.positions(first_token, num_tokens)
        for group in SPEC.groups
    }


def first_block(group: str, start: int) -> int:
    """The block of a request that has this position."""
    return start // SPEC.group(group).block_size


class Cache:
    """The ranks' memory, and the blocks that are free."""

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

    def rows(self, blocks: Blocks, spans: Spans) -> Iterator[tuple[torch.Tensor, Any, Rows]]:
        """A view, where in it KV lies [position, head, byte], and what tells its numbers."""
        for group in SPEC.groups:
            start, stop = spans[group.name]
            if start == stop:
                continue
            table, positions = torch.tensor(blocks[group.name]), torch.arange(start, stop)
            size, tokens = group.block_size, range(start, stop)
            at = table[positions // size - start // size], positions % size
            for rank, cache in enumerate(self.ranks):
                for layer, (number, part) in product(group.layers, enumerate(group.parts)):
                    view = cache.view(layer, part).view(torch.uint8)
                    held = view.shape[2]
                    heads = range(rank * held, (rank + 1) * held)
                    yield view, at, Rows(layer, number, tokens, heads, view.shape[3])

    def fill(self, name: int, blocks: Blocks, spans: Spans) -> None:
        for view, at, which in self.rows(blocks, spans):
            view[at] = numbers(name, which)

    def num_wrong(self, name: int, blocks: Blocks, spans: Spans) -> int:
        runs = self.rows(blocks, spans)
        return sum(int((view[at] != numbers(name, which)).sum()) for view, at, which in runs)


async def until_not_busy(ask: Any) -> Any:
    """The reply to a request, asked again while the agent is busy."""
    while True:
        try:
            return await ask()
        except RequestRefused as error:
            if error.code is not ErrorCode.BUSY:
                raise
            await asyncio.sleep(float(error.detail.get("retry_after_s", 0.1)))


class Prefill:
    def __init__(self, session: PrefillSession, cache: Cache) -> None:
        self.session, self.cache = session, cache
        self.offers: dict[int, Offer] = {}

    async def offer(self, name: int, rest: str) -> None:
        first, *later = [int(count) for count in rest.split()]
        spans = positions_of(0, first, whole=bool(later))
        blocks: Blocks = {}
        self.cache.grow(blocks, spans)
        self.cache.fill(name, blocks, spans)
        try:
            offer = self.offers[name] = await until_not_busy(
                lambda: self.session.offer(
                    str(name),
                    num_tokens=first,
                    block_ids=blocks,
                    sealed=not later,
                    first_blocks={g: first_block(g, start) for g, (start, _) in spans.items()},
                )
            )
            tell("ticket", name, json.dumps(offer.ticket))
            await self.extend(name, offer, blocks, later)
            tell("released", name, (await offer.released()).value)
        except RequestRefused as error:
            tell("refused", name, error.code.value)
        except KVBusError:
            tell("released", name, "lost")
        self.cache.give_back(blocks)

    async def extend(self, name: int, offer: Offer, blocks: Blocks, later: list[int]) -> None:
        for count in later:
            spans = positions_of(0, count, whole=True)
            new = self.cache.grow(blocks, spans)
            self.cache.fill(name, blocks, spans)
            await offer.extend(count, {group: ids for group, ids in new.items() if ids})
        if later:
            await offer.seal()

    async def withdraw(self, name: int, _: str) -> None:
        await self.offers[name].withdraw()


class Decode:
    def __init__(self, session: DecodeSession, cache: Cache) -> None:
        self.session, self.cache = session, cache
        self.fetches: dict[int, Fetch] = {}

    async def fetch(self, name: int, rest: str) -> None:
        first, last, ticket = rest.split(" ", 2)
        tokens = int(first), int(last)
        spans, blocks = positions_of(*tokens), Blocks()
        self.cache.grow(blocks, spans)
        try:
            await self.until_completed(name, json.loads(ticket), blocks, tokens)
        except RequestRefused as error:
            tell("refused", name, error.code.value)
            self.cache.give_back(blocks)
            return
        except FetchFailed as error:
            tell("fetched", name, "lost" if error.stage == "lost" else _outcome(error))
            with suppress(KVBusError):
                await self.fetches[name].blocks_freed()
        else:
            tell("fetched", name, "completed", self.cache.num_wrong(name, blocks, spans))
        self.cache.give_back(blocks)

    async def until_completed(
        self, name: int, ticket: Any, blocks: Blocks, tokens: tuple[int, int]
    ) -> None:
        while True:
            fetch = self.session.fetch(
                ticket, num_tokens=tokens[1], block_ids=blocks, first_token=tokens[0]
            )
            self.fetches[name] = fetch
            try:
                await fetch.completed()
            except FetchFailed as error:
                if error.stage != "requested":
                    raise
                if error.code is not ErrorCode.BUSY:
                    raise RequestRefused(error.message, code=error.code) from error
                await asyncio.sleep(0.5)
            else:
                return

    async def cancel(self, name: int, _: str) -> None:
        await self.fetches[name].cancel()


def _outcome(error: FetchFailed) -> str:
    return "cancelled" if error.code is ErrorCode.CANCELLED else "failed"


async def serve(lines: "asyncio.Queue[str]", stack: AsyncExitStack) -> bool:
    """Be an engine until its agent goes; False at the end of the lines."""
    attach, role = os.environ["KVBUS_ATTACH"], os.environ["KVBUS_ROLE"]
    kind = PrefillSession if role == "prefill" else DecodeSession
    control: ControlSession = await stack.enter_async_context(kind(attach, SPEC, **WAIT))
    ranks = []
    for rank in range(SPEC.tp_size):
        memory = await stack.enter_async_context(MemorySession(attach, SPEC, rank, **WAIT))
        ranks.append(await memory.allocate(KvLayout.parse("HND"), num_blocks=NUM_BLOCKS))
    await control.register()
    await control.ready()
    engine: Any = (Prefill if role == "prefill" else Decode)(control, Cache(ranks))
    ended = asyncio.create_task(control.ended())
    tasks = set()
    while True:
        line = asyncio.create_task(lines.get())
        await asyncio.wait({line, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            line.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return True
        if not line.result():
            ended.cancel()
            return False
        word, name, *rest = line.result().split(" ", 2)
        tasks.add(asyncio.create_task(getattr(engine, word)(int(name), *rest or [""])))


WAIT: Any = {"attach_timeout_s": 30.0}


async def main() -> None:
    reader: asyncio.StreamReader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    lines: asyncio.Queue[str] = asyncio.Queue()

    async def read() -> None:
        while line := await reader.readline():
            lines.put_nowait(line.decode().rstrip("\n"))
        lines.put_nowait("")

    reading = asyncio.create_task(read())
    again = True
    while again:
        async with AsyncExitStack() as stack:
            try:
                again = await serve(lines, stack)
            except PeerLost:
                again = True
    await reading


if __name__ == "__main__":
    asyncio.run(main())
