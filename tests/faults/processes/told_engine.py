"""An engine to be stopped: makes an offer, or starts a fetch, and says how that ended.

    told_engine.py ATTACH ENGINE_ID sealed
    told_engine.py ATTACH ENGINE_ID open
    told_engine.py ATTACH ENGINE_ID decode TICKET

Prints a line of JSON once the offer is made (its ticket) or the fetch is asked for, and one with
the outcome when it has ended.
"""

import json
import sys
from pathlib import Path

import anyio

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import FetchFailed
from tests.engines import LARGE, NUM_LARGE_BLOCKS, engine, make_spec

NUM_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
BLOCKS = {"full": list(range(NUM_LARGE_BLOCKS))}


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(attach: Path, engine_id: str, role: str, ticket: dict[str, object] | None) -> None:
    spec, shape = make_spec(groups=(LARGE,), engine_id=engine_id), {"num_blocks": NUM_LARGE_BLOCKS}
    asked = {"num_tokens": NUM_TOKENS, "block_ids": BLOCKS}
    kind = PrefillSession if ticket is None else DecodeSession
    async with engine(kind, attach, spec, seed=1, **shape) as mine:
        if ticket is None:
            offer = await mine.prefill.offer("r", sealed=role == "sealed", **asked)
            say(offer.ticket)
            say(await offer.released())
        else:
            fetch = mine.decode.fetch(ticket, **asked)
            say("asked")
            try:
                say((await fetch.completed()).outcome)
            except FetchFailed as failure:
                say(failure.code)
        await anyio.sleep_forever()


attach_path, name, wanted, *rest = sys.argv[1:]
anyio.run(main, Path(attach_path), name, wanted, json.loads(rest[0]) if rest else None)
