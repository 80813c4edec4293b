"""The demo's decode engine, a process: fetches KV that another engine computed, and goes on.

Refuses to use blocks before their fetch has completed, and to reuse those of a failed fetch before
the agent says that nothing can write into them any more.
"""

import time
from collections.abc import Sequence
from functools import partial
from random import Random

import torch

from kvbus.demo.engine import GROUP, Engine, answer, attached_engine, run_engine, serve
from kvbus.demo.generate import decode
from kvbus.demo.paged_cache import PagedKV
from kvbus.demo.step import Step
from kvbus.demo.work import Decode, Decoded, EngineSetup, Failed
from kvbus.engine import DecodeSession, Fetch
from kvbus.errors import FetchFailed
from kvbus.geometry import num_blocks_for
from kvbus.protocol.engine import Fetched


async def main(setup: EngineSetup) -> None:
    """Attach, and serve until the driver closes the pipe."""
    async with attached_engine(setup, DecodeSession) as (engine, session):
        requests = DecodeRequests(engine, session)
        await serve(engine, session.agent.peer_endpoint, Decode, requests.handle)


class DecodeRequests:
    """The requests of one decode engine."""

    def __init__(self, engine: Engine, session: DecodeSession) -> None:
        self._engine, self._session = engine, session
        self._flips_left = int(engine.setup.flip_one_byte)

    async def handle(self, work: Decode) -> None:
        """One request, from its ticket to the release of its blocks."""
        engine = self._engine
        num_blocks = num_blocks_for(work.num_tokens + work.num_steps, engine.setup.block_size)
        block_ids = await engine.pool.take(num_blocks)
        began = time.perf_counter()
        fetch = self._fetch(work, block_ids)
        try:
            fetched = await fetch.completed()
        except FetchFailed as error:
            answer(Failed(work.request_id, error.code, error.message))
            await fetch.blocks_freed()
        else:
            await self._go_on(work, block_ids, fetched, time.perf_counter() - began)
        engine.pool.give(block_ids)

    def _fetch(self, work: Decode, block_ids: Sequence[int]) -> Fetch:
        filled = num_blocks_for(work.num_tokens, self._engine.setup.block_size)
        return self._session.fetch(
            work.ticket, num_tokens=work.num_tokens, block_ids={GROUP: block_ids[:filled]}
        )

    async def _go_on(
        self, work: Decode, block_ids: Sequence[int], fetched: Fetched, handoff_s: float
    ) -> None:
        if self._flips_left:
            self._flips_left -= 1
            flip_one_byte(self._engine.kv, block_ids, num_tokens=work.num_tokens)
        steps = await self._generate(work, block_ids)
        answer(
            Decoded(
                request_id=work.request_id,
                steps=steps,
                num_bytes=fetched.num_bytes,
                path=fetched.path,
                handoff_s=handoff_s,
                stages_s=fetched.stages_s,
            )
        )

    async def _generate(self, work: Decode, block_ids: Sequence[int]) -> list[Step]:
        """Step by step, so that the requests in flight take turns on the device."""
        engine, token = self._engine, work.first_token
        steps: list[Step] = []
        for i in range(work.num_steps):
            step = partial(
                decode,
                engine.model,
                engine.kv,
                block_ids,
                first_token=token,
                position=work.num_tokens + i,
                num_steps=1,
            )
            steps += await engine.compute(step)
            token = steps[-1].token
        return steps


def flip_one_byte(kv: PagedKV, block_ids: Sequence[int], *, num_tokens: int) -> None:
    """Change one byte of a fetched K, somewhere."""
    rng = Random(num_tokens)  # noqa: S311 - any place will do
    k = rng.choice(rng.choice(kv.views)).k
    position, head = rng.randrange(num_tokens), rng.randrange(k.shape[2])
    row = k[block_ids[position // kv.block_size], position % kv.block_size, head].view(torch.uint8)
    row[rng.randrange(len(row))] ^= 0xFF


if __name__ == "__main__":
    run_engine(main)
