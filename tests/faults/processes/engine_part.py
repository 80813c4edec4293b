"""One process of an engine of two ranks, to be killed: its scheduler, or a worker.

    engine_part.py ATTACH ENGINE_ID rank NUMBER
    engine_part.py ATTACH ENGINE_ID prefill
    engine_part.py ATTACH ENGINE_ID decode TICKET

Prints one line of JSON once it is registered, has made an offer, or has a fetch on its way, and one
more with the code when its agent has sent it away.
"""

import json
import sys
from pathlib import Path

import anyio

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.engine.session import EngineSession
from tests.engines import LARGE, NHD, NUM_LARGE_BLOCKS, make_spec

NUM_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
BLOCKS = {"full": list(range(NUM_LARGE_BLOCKS))}


async def start(session: EngineSession, argument: str) -> dict[str, object]:
    """What is said of it."""
    match session:
        case MemorySession():
            await session.allocate(NHD, num_blocks=NUM_LARGE_BLOCKS)
        case PrefillSession():
            await session.register()
            await session.ready()
            offer = await session.offer("r", num_tokens=NUM_TOKENS, block_ids=BLOCKS)
            return offer.ticket
        case DecodeSession():
            await session.register()
            await session.ready()
            ticket = json.loads(argument)
            fetch = session.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=BLOCKS)
            return {"fetch_id": fetch.fetch_id}
    return {}


async def main(attach: Path, engine_id: str, role: str, argument: str = "") -> None:
    spec = make_spec(tp=2, groups=(LARGE,), engine_id=engine_id)
    made: dict[str, EngineSession] = {
        "rank": MemorySession(attach, spec, int(argument) if role == "rank" else 0),
        "prefill": PrefillSession(attach, spec),
        "decode": DecodeSession(attach, spec),
    }
    async with made[role] as session:
        print(json.dumps(await start(session, argument)), flush=True)
        print(json.dumps({"lost": (await session.ended()).code}), flush=True)


anyio.run(main, Path(sys.argv[1]), *sys.argv[2:])
