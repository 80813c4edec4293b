"""The demo's decode engine, a process: fetches KV that another engine computed, and goes on.

Refuses to use blocks before their fetch has completed, and to reuse those of a failed fetch before
the agent says that nothing can write into them any more.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from functools import partial
from random import Random

import torch

from kvbus.demo.blocks import Tables, decode_blocks
from kvbus.demo.engine import PATIENCE_S, DemoEngine, run_engine
from kvbus.demo.messages import Decode, Decoded, Failed, FirstToken, Step
from kvbus.demo.model import Generation, first_seen
from kvbus.demo.paged_cache import slots
from kvbus.engine import DecodeSession
from kvbus.engine.bounce import HostDecode
from kvbus.errors import FetchFailed, KVBusError
from kvbus.geometry import num_blocks_for


async def main(engine: DemoEngine[DecodeSession]) -> None:
    """Serve, through the ring if there is one."""
    async with contextlib.AsyncExitStack() as stack:
        fetcher: DecodeSession | HostDecode = engine.session
        if engine.ring is not None:
            through_ring = HostDecode(engine.session, *engine.ring, wait_s=PATIENCE_S)
            fetcher = await stack.enter_async_context(through_ring)
        requests = DecodeRequests(engine, fetcher)
        await engine.serve({Decode: requests.handle, FirstToken: requests.take_first_token})


class DecodeRequests:
    """The requests of one decode engine."""

    def __init__(
        self, engine: DemoEngine[DecodeSession], fetcher: DecodeSession | HostDecode
    ) -> None:
        self._engine, self._fetcher = engine, fetcher
        self._first_tokens: defaultdict[str, asyncio.Queue[int]] = defaultdict(asyncio.Queue)
        self._flips_left = int(engine.setup.flip_one_byte)

    async def take_first_token(self, first: FirstToken) -> None:
        """What a request goes on from, once its KV is there; a failed one does not go on."""
        if first.request_id in self._first_tokens:
            self._first_tokens[first.request_id].put_nowait(first.token)

    async def handle(self, work: Decode) -> None:
        """One request, from its ticket to the release of its blocks."""
        engine, first_token = self._engine, self._first_tokens[work.request_id]
        tables = await engine.take(
            lambda group: decode_blocks(group, work.num_tokens, work.num_steps)
        )
        # The blocks of the prompt; those after them are for the new tokens.
        num_blocks = num_blocks_for(work.num_tokens, engine.setup.shape.block_size)
        block_ids = {
            group: table.array()[: num_blocks - table.first_block]
            for group, table in tables.items()
        }
        began = time.monotonic()
        fetch = self._fetcher.fetch(work.ticket, num_tokens=work.num_tokens, block_ids=block_ids)
        try:
            fetched = await fetch.ended
        except FetchFailed as error:
            with contextlib.suppress(KVBusError):  # then the offer ends by its time to live
                await fetch.cancel(release_offer=True)
            await engine.line.send(Failed(work.request_id, error.code, error.message))
            await fetch.freed
        else:
            fetched_at_s = time.monotonic()
            decoded = Decoded(
                work.request_id,
                steps=await self._go_on(work, tables, await first_token.get()),
                num_bytes=fetched.num_bytes,
                path=fetched.path,
                handoff_s=fetched_at_s - began,
                fetched_at_s=fetched_at_s,
                stages_s=fetched.stages_s,
            )
            await engine.line.send(decoded)
        del self._first_tokens[work.request_id]
        engine.blocks.give(tables)

    async def _go_on(self, work: Decode, tables: Tables, token: int) -> list[Step]:
        """Step by step, so that the requests in flight take turns on the device."""
        generation, steps = Generation(self._engine.model, self._engine.kv, tables), list[Step]()
        if self._flips_left:
            self._flips_left -= 1
            rng = Random(work.num_tokens)  # noqa: S311 - any place will do
            flip_one_byte(generation, work.num_tokens, rng)
        for position in range(work.num_tokens, work.num_tokens + work.num_steps):
            steps += await self._engine.compute(partial(generation.decode, token, position))
            token = steps[-1].token
        return steps


def flip_one_byte(generation: Generation, num_tokens: int, rng: Random) -> None:
    """Change one byte of a fetched K, or latent, somewhere that the next token attends to."""
    config, tables = generation.model.config, generation.tables
    layer = rng.randrange(config.num_layers)
    view = rng.choice(generation.kv.ranks_of(layer))[config.parts[0]]
    position = rng.randrange(first_seen(num_tokens, config.window_of(layer)), num_tokens)
    block, slot = slots(tables[config.group_of(layer)], view, position, position + 1)
    row = view[int(block), int(slot), rng.randrange(view.shape[2])].view(torch.uint8)
    row[rng.randrange(len(row))] ^= 0xFF


if __name__ == "__main__":
    run_engine(DecodeSession, main)
