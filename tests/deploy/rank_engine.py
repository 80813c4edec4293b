"""One rank of an engine over two pods, run by its path in the engine's container of a pod.

    python rank_engine.py ROLE ATTACH OTHERS

``OTHERS`` are `AgentRanks` as JSON, for the leader: it has rank 0 and the control session. Without
any this is rank 1. A prefill rank has bytes that its number gives. Each writes what has happened,
a line each; the leader of a decode engine reads the ticket as a line, and a decode rank then
compares its bytes at the next line.
"""

import json
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import torch
from msgspec import convert
from torch import Tensor

from kvbus.engine import DecodeSession, KvCache, MemorySession, PrefillSession
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout
from kvbus.protocol import AgentRanks

ACCESS = "access-to-the-rank-in-the-other-pod"
GROUP = GroupSpec("full", (0, 1), 16, 4, 8, "bfloat16")
LAYOUT = KvLayout.parse("NHD")
NUM_BLOCKS, NUM_TOKENS = 16, 40
THEIRS, OURS = [2, 5, 3], [7, 1, 9]


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def heard() -> Any:
    """The next line that is said here."""
    return json.loads(await anyio.to_thread.run_sync(sys.stdin.readline))


def views(cache: KvCache) -> Iterable[Tensor]:
    """Of each layer and part: block, token, head, dim; as bits."""
    for layer in GROUP.layers:
        for part in GROUP.parts:
            yield cache.view(layer, part).view(torch.int16)


def fill(cache: KvCache, rank: int) -> None:
    for number, view in enumerate(views(cache)):
        generator = torch.Generator().manual_seed(100 * rank + number)
        view.copy_(torch.randint(-30000, 30000, view.shape, generator=generator, dtype=view.dtype))


def has_all(cache: KvCache, rank: int) -> bool:
    """Whether the tokens are those of this rank at the other side."""
    whole, rest = divmod(NUM_TOKENS, GROUP.block_size)
    for number, view in enumerate(views(cache)):
        generator = torch.Generator().manual_seed(100 * rank + number)
        wanted = torch.randint(-30000, 30000, view.shape, generator=generator, dtype=view.dtype)
        found = view[OURS[:whole]].equal(wanted[THEIRS[:whole]])
        if not found or not view[OURS[whole], :rest].equal(wanted[THEIRS[whole], :rest]):
            return False
    return True


async def serve(role: str, attach: Path, others: list[AgentRanks]) -> None:
    """Be the rank, and the engine where there are others, until stdin ends."""
    spec = EngineSpec(f"{role}-0", "m", 2, (GROUP,))
    rank = 0 if others else 1
    kind = PrefillSession if role == "prefill" else DecodeSession
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(kind(attach, spec)) if others else None
        memory = await stack.enter_async_context(MemorySession(attach, spec, rank, access=ACCESS))
        cache = await memory.allocate(LAYOUT, num_blocks=NUM_BLOCKS)
        if role == "prefill":
            fill(cache, rank)
        say("attached")
        if control is not None:
            await control.register(others=others)
            await control.ready()
            say("ready")
        if isinstance(control, PrefillSession):
            offer = await control.offer("r", num_tokens=NUM_TOKENS, block_ids={"full": THEIRS})
            say(offer.ticket)
            say(await offer.released())
        elif isinstance(control, DecodeSession):
            fetch = control.fetch(await heard(), num_tokens=NUM_TOKENS, block_ids={"full": OURS})
            say((await fetch.completed()).path)
        if role == "decode":
            await heard()
            say(has_all(cache, rank))
        await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(
        serve, sys.argv[1], Path(sys.argv[2]), convert(json.loads(sys.argv[3]), list[AgentRanks])
    )
