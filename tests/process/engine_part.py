"""A process of an engine of two ranks, to be killed or stopped.

    engine_part.py ATTACH ENGINE_ID RANKS rank
    engine_part.py ATTACH ENGINE_ID RANKS prefill
    engine_part.py ATTACH ENGINE_ID RANKS decode TICKET

``RANKS`` are those of this process, such as ``0,1``. With a role it has the control session, too:
it makes an offer of all its blocks, or fetches a ticket into them. It prints a line of JSON once it
is registered, has made the offer, or has asked; and one when that has ended, or its agent has sent
it away.
"""

import json
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.errors import FetchFailed, KVBusError
from tests.engines import LARGE, NUM_LARGE_BLOCKS, make_spec
from tests.memories import NHD

NUM_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
BLOCKS = {LARGE.name: list(range(NUM_LARGE_BLOCKS))}


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


async def offer(session: PrefillSession) -> str:
    offered = await session.offer("r", num_tokens=NUM_TOKENS, block_ids=BLOCKS)
    say(offered.ticket)
    return await offered.released()


async def fetch(session: DecodeSession, ticket: Any) -> str:
    fetched = session.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=BLOCKS)
    say({"fetch_id": fetched.fetch_id})
    return (await fetched.completed()).outcome


async def run(attach: str, engine_id: str, ranks: str, role: str, ticket: str) -> None:
    spec = make_spec(tp=2, groups=(LARGE,), engine_id=engine_id)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        memories = [
            await enter(MemorySession(Path(attach), spec, int(rank))) for rank in ranks.split(",")
        ]
        for memory in memories:
            await memory.allocate(NHD, num_blocks=NUM_LARGE_BLOCKS)
        try:
            if role == "rank":
                say({})
                say({"ended": (await memories[0].ended()).code})
                return
            control = await enter(
                {"prefill": PrefillSession, "decode": DecodeSession}[role](Path(attach), spec)
            )
            await control.register()
            await control.ready()
            if isinstance(control, PrefillSession):
                say({"ended": await offer(control)})
            else:
                say({"ended": await fetch(control, json.loads(ticket))})
        except (FetchFailed, KVBusError) as error:
            say({"ended": error.code})


def main() -> None:
    anyio.run(partial(run, *sys.argv[1:]))


if __name__ == "__main__":
    main()
