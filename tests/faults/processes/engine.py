"""An engine to be killed: makes an offer, or starts a fetch of the ticket it is given, and stays.

    engine.py ATTACH ENGINE_ID prefill
    engine.py ATTACH ENGINE_ID decode TICKET

With ``staged-prefill`` or ``staged-decode`` its memory is unregistered. Prints one line of JSON
once the offer is made, or once the fetch is on its way.
"""

import json
import sys
from pathlib import Path

import anyio

from kvbus.engine import DecodeSession, PrefillSession
from tests.engines import LARGE, NUM_LARGE_BLOCKS, engine, make_spec
from tests.memories import Memory

NUM_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
BLOCKS = {"full": list(range(NUM_LARGE_BLOCKS))}


async def main(
    attach: Path, engine_id: str, memory: Memory, ticket: dict[str, object] | None
) -> None:
    kind = PrefillSession if ticket is None else DecodeSession
    spec = make_spec(groups=(LARGE,), engine_id=engine_id)
    shape = {"memory": memory, "num_blocks": NUM_LARGE_BLOCKS}
    async with engine(kind, attach, spec, **shape) as mine:
        if ticket is None:
            offer = await mine.prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=BLOCKS)
            print(json.dumps(offer.ticket), flush=True)
        else:
            mine.decode.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=BLOCKS)
            print("{}", flush=True)
        await anyio.sleep_forever()


attach_path, name, role, *rest = sys.argv[1:]
memory = Memory(direct=not role.startswith("staged-"))
anyio.run(main, Path(attach_path), name, memory, json.loads(rest[0]) if rest else None)
