"""An engine to be killed: registers KV on a GPU, offers all of it, and stays.

    engine_process.py ATTACH ENGINE_ID NUM_BLOCKS

Prints the bytes of its KV cache, and its ticket as JSON, once the agent has both.
"""

import json
import sys
from pathlib import Path

import anyio

import tests.process.gpu.fake  # noqa: F401 - loads the driver
from kvbus.engine import Link, RankMemory
from tests.support.engines import LARGE, make_spec
from tests.support.memories import NHD


async def main(attach: Path, engine_id: str, num_blocks: int) -> None:
    spec = make_spec(groups=(LARGE,), engine_id=engine_id)
    memory = RankMemory.allocate(spec, 0, NHD, num_blocks=num_blocks, device="cuda:0")
    async with Link(attach, spec, memory=memory) as link:
        block_ids = {LARGE.name: range(num_blocks)}
        num_tokens = num_blocks * LARGE.block_size
        offer = await link.offer("doomed", num_tokens=num_tokens, block_ids=block_ids)
        print(memory.rank.segments[0].size_bytes, flush=True)
        print(json.dumps(offer.ticket), flush=True)
        await anyio.sleep_forever()


anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
