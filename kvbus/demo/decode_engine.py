"""The demo's decode engine, a process: fetches KV that another engine computed, and goes on.

Refuses to use blocks before their fetch has completed, and to reuse those of a failed fetch before
the agent says that nothing can write into them any more.
"""

import asyncio
import contextlib
import time
from functools import partial
from random import Random

import torch

from kvbus.demo.attention import first_seen
from kvbus.demo.engine import Engine, attached_engine
from kvbus.demo.generate import decode
from kvbus.demo.paged_cache import Tables, slots
from kvbus.demo.request_blocks import decode_blocks, most_decode_blocks
from kvbus.demo.serving import answer, run_engine, serve
from kvbus.demo.step import Step
from kvbus.demo.work import Decode, Decoded, EngineSetup, Failed, FirstToken
from kvbus.engine import DecodeSession, Fetch
from kvbus.engine.bounce import HostDecode, HostFetch
from kvbus.errors import FetchFailed
from kvbus.geometry import num_blocks_for

RING_WAIT_S = 60.0
Fetcher = DecodeSession | HostDecode


async def main(setup: EngineSetup) -> None:
    """Attach, and serve until the driver closes the pipe."""
    async with contextlib.AsyncExitStack() as stack:
        attached = attached_engine(setup, DecodeSession, most_decode_blocks)
        engine, session = await stack.enter_async_context(attached)
        fetcher: Fetcher = session
        if engine.ring is not None and engine.copier is not None:
            through_ring = HostDecode(session, engine.ring, engine.copier, wait_s=RING_WAIT_S)
            fetcher = await stack.enter_async_context(through_ring)
        requests = DecodeRequests(engine, fetcher)
        await serve(
            engine,
            session.agent.peer_endpoint,
            {Decode: requests.handle, FirstToken: requests.take_first_token},
        )


class DecodeRequests:
    """The requests of one decode engine."""

    def __init__(self, engine: Engine, fetcher: Fetcher) -> None:
        self._engine, self._fetcher = engine, fetcher
        self._first_tokens: dict[str, asyncio.Future[int]] = {}
        self._flips_left = int(engine.setup.flip_one_byte)

    async def take_first_token(self, first: FirstToken) -> None:
        """What a request goes on from, once its KV is there; a failed one does not go on."""
        if (waiting := self._first_tokens.get(first.request_id)) is not None:
            waiting.set_result(first.token)

    async def handle(self, work: Decode) -> None:
        """One request, from its ticket to the release of its blocks."""
        engine = self._engine
        self._first_tokens[work.request_id] = asyncio.get_running_loop().create_future()
        wanted = {
            group.name: decode_blocks(group, work.num_tokens, work.num_steps)
            for group in engine.spec.groups
        }
        tables = await engine.pools.take(wanted)
        began = time.monotonic()
        fetch = self._fetch(work, tables)
        try:
            fetched = await fetch.completed()
        except FetchFailed as error:
            answer(Failed(work.request_id, error.code, error.message))
            await fetch.blocks_freed()
        else:
            fetched_at_s = time.monotonic()
            steps = await self._go_on(work, tables, await self._first_tokens[work.request_id])
            answer(
                Decoded(
                    request_id=work.request_id,
                    steps=steps,
                    num_bytes=fetched.num_bytes,
                    path=fetched.path,
                    handoff_s=fetched_at_s - began,
                    fetched_at_s=fetched_at_s,
                    stages_s=fetched.stages_s,
                )
            )
        del self._first_tokens[work.request_id]
        engine.pools.give(tables)

    def _fetch(self, work: Decode, tables: Tables) -> Fetch | HostFetch:
        """Ask for the prompt's blocks; the others are for the new tokens."""
        num_blocks = num_blocks_for(work.num_tokens, self._engine.setup.side.block_size)
        block_ids = {
            group: table.array()[: num_blocks - table.first_block]
            for group, table in tables.items()
        }
        return self._fetcher.fetch(work.ticket, num_tokens=work.num_tokens, block_ids=block_ids)

    async def _go_on(self, work: Decode, tables: Tables, token: int) -> list[Step]:
        """Step by step, so that the requests in flight take turns on the device."""
        engine = self._engine
        if self._flips_left:
            self._flips_left -= 1
            rng = Random(work.num_tokens)  # noqa: S311 - any place will do
            flip_one_byte(engine, tables, num_tokens=work.num_tokens, rng=rng)
        steps: list[Step] = []
        for i in range(work.num_steps):
            step = partial(
                decode,
                engine.model,
                engine.kv,
                tables,
                first_token=token,
                position=work.num_tokens + i,
                num_steps=1,
            )
            steps += await engine.compute(step)
            token = steps[-1].token
        return steps


def flip_one_byte(engine: Engine, tables: Tables, *, num_tokens: int, rng: Random) -> None:
    """Change one byte of a fetched K, or latent, somewhere that the next token attends to."""
    config = engine.model.config
    layer = rng.randrange(config.num_layers)
    view = rng.choice(engine.kv.ranks_of(layer))[config.parts[0]]
    position = rng.randrange(first_seen(num_tokens, config.window_of(layer)), num_tokens)
    block, slot = slots(tables[config.group_of(layer)], view, position, position + 1)
    row = view[int(block), int(slot), rng.randrange(view.shape[2])].view(torch.uint8)
    row[rng.randrange(len(row))] ^= 0xFF


if __name__ == "__main__":
    run_engine(main)
