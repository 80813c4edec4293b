"""An engine on kvbus's own SDK, of both roles, as docs/conformance.md wants one."""

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack, suppress
from typing import Any

from sdk_cache import NUM_BLOCKS, SPEC, Blocks, Cache, first_block, positions_of, tell

from kvbus.engine import DecodeSession, Fetch, MemorySession, Offer, PrefillSession
from kvbus.engine.control import ControlSession
from kvbus.errors import ErrorCode, FetchFailed, KVBusError, PeerLost, RequestRefused
from kvbus.geometry import KvLayout


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
            offer = self.offers[name] = await self.session.offer(
                str(name),
                num_tokens=first,
                block_ids=blocks,
                sealed=not later,
                first_blocks={g: first_block(g, start) for g, (start, _) in spans.items()},
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
        fetch = self.session.fetch(
            ticket, num_tokens=tokens[1], block_ids=blocks, first_token=tokens[0]
        )
        self.fetches[name] = fetch
        try:
            await fetch.completed()
        except FetchFailed as error:
            if error.stage != "requested":
                raise
            raise RequestRefused(error.message, code=error.code) from error

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
