"""The demo's decode engine, a process: fetches KV that another engine computed, and goes on.

Blocks are used only when their fetch has completed, and those of a failed one only for another
request when nothing can write into them any more.
"""

import asyncio
import contextlib
from collections import defaultdict
from functools import partial
from random import Random

import torch

from kvbus.demo.engine import DemoEngine, run_engine
from kvbus.demo.messages import Decode, Decoded, Failed, FirstToken, Step
from kvbus.demo.model import Generation, first_seen
from kvbus.demo.paged_cache import slots
from kvbus.errors import FetchFailed, KVBusError
from kvbus.geometry import GroupSpec, num_blocks_for
from kvbus.lab.engine import Tables


class DecodeRequests:
    """The requests of one decode engine."""

    def __init__(self, engine: DemoEngine) -> None:
        self._engine = engine
        self._first_tokens: defaultdict[str, asyncio.Queue[int]] = defaultdict(asyncio.Queue)
        self._flips_left = int(engine.setup.flip_one_byte)

    async def serve(self) -> None:
        """Until the driver closes the line."""
        await self._engine.serve({Decode: self.handle, FirstToken: self.take_first_token})

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
        taking = engine.engine.fetch(work.ticket, num_tokens=work.num_tokens, block_ids=block_ids)
        try:
            taken = await taking.taken()
        except FetchFailed as error:
            with contextlib.suppress(KVBusError):  # then the offer ends by its time to live
                await taking.fetch.cancel(release_offer=True)
            await engine.line.send(Failed(work.request_id, error.code, error.message))
            await taking.fetch.freed
        else:
            decoded = Decoded(
                work.request_id,
                steps=await self._go_on(work, tables, await first_token.get()),
                num_bytes=taken.fetched.num_bytes,
                path=taken.fetched.path,
                handoff_s=taken.seconds,
                fetched_at_s=taken.at_s,
                stages_s=taken.fetched.stages_s,
            )
            await engine.line.send(decoded)
        del self._first_tokens[work.request_id]
        engine.engine.blocks.give(tables)

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


def decode_blocks(group: GroupSpec, num_tokens: int, num_new: int) -> range:
    """By position, the blocks of what is read of a prompt, and of the new tokens after it.

    The decode side has no blocks for what a sliding window has left behind.
    """
    first, _ = group.positions(0, num_tokens)
    size = group.block_size
    return range(first // size, num_blocks_for(num_tokens + num_new, size))


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
    run_engine(lambda engine: DecodeRequests(engine).serve())
