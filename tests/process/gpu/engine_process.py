"""An engine to be killed: registers KV on a GPU, and stays.

    engine_process.py ATTACH ENGINE_ID NUM_BLOCKS

Prints the bytes of its KV cache once the agent has it.
"""

import sys
from pathlib import Path

import anyio

from tests.support.engines import LARGE, engine, make_spec
from tests.support.memories import Memory


async def main(attach: Path, engine_id: str, num_blocks: int) -> None:
    spec = make_spec(groups=(LARGE,), engine_id=engine_id)
    memory = Memory(device="cuda:0")
    async with engine(attach, spec, memory=memory, num_blocks=num_blocks) as mine:
        print(sum(segment.size_bytes for segment in mine.caches[0].rank.segments), flush=True)
        await anyio.sleep_forever()


anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
