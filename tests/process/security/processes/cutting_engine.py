"""An engine that truncates the file of its memory while a handoff is under way.

    cutting_engine.py ATTACH ENGINE_ID ROLE [TICKET]

ROLE is prefill or decode, or staged-prefill and staged-decode for unregistered memory. Prints the
ticket of its offer, or nothing once its fetch of TICKET is on its way. As short-prefill it prints
the tickets of two short offers. Truncates when it is told a line, says so, and touches the memory
no more.
"""

import json
import os
import sys
from pathlib import Path

import anyio

from tests.support.engines import LARGE, NUM_LARGE_BLOCKS, engine, make_spec
from tests.support.memories import Memory

NUM_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
BLOCKS = {"full": list(range(NUM_LARGE_BLOCKS))}


def cut() -> None:
    """Truncate what torch has in shared memory, which cannot be sealed."""
    for fd in Path("/proc/self/fd").iterdir():
        if fd.is_symlink() and fd.readlink().name.startswith("torch_"):
            os.ftruncate(int(fd.name), 0)


async def main(attach: Path, role: str, engine_id: str, ticket: dict[str, object] | None) -> None:
    memory = Memory(apart=True, direct=not role.startswith("staged-"))
    spec = make_spec(groups=(LARGE,), engine_id=engine_id)
    async with engine(attach, spec, memory=memory, num_blocks=NUM_LARGE_BLOCKS, seed=1) as mine:
        if role == "short-prefill":
            for name in "ab":
                offer = await mine.prefill.offer(name, num_tokens=64, block_ids={"full": [0]})
                print(json.dumps(offer.ticket), flush=True)
        elif ticket is None:
            offer = await mine.prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=BLOCKS)
            print(json.dumps(offer.ticket), flush=True)
        else:
            mine.decode.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=BLOCKS)
            print("{}", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        cut()
        print('"cut"', flush=True)
        os.close(1)
        await anyio.sleep_forever()


attach_path, name, role, *rest = sys.argv[1:]
anyio.run(main, Path(attach_path), role, name, json.loads(rest[0]) if rest else None)
