"""The prefill side: an engine for each case, one offer after the other, until all were read.

Refuses to go on, and so to keep its memory, when nobody reads.
"""

import select
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from kvbus.bench.caches import fill, open_caches
from kvbus.bench.shapes import GROUP, PairedBlocks
from kvbus.bench.sides.cases import CASES, PairCase
from kvbus.bench.sides.handed import PIPE_IT, Handed
from kvbus.engine import PrefillSession
from kvbus.errors import ConfigError, PeerLost, RequestTimeout
from kvbus.output import write_text
from kvbus.protocol.engine import Outcome

LOOK_THERE = "look at the error of kvbus bench-decode"
READ_WITHIN_S = 60.0
RELEASED_WITHIN_S = 2.0
"""After the reader of the lines has ended: it may have had all of them."""


async def prefill_side(attach_path: Path, *, num_mib: int, rounds: int) -> None:
    """Offer the handoffs of all cases in turn, a line on stdout each.

    Raises `RequestTimeout` when an offer is not read, `PeerLost` when who reads the lines ends, or
    the agent.
    """
    if sys.stdout is None or sys.stdout.isatty():
        raise ConfigError(f"stdout is no pipe: {PIPE_IT} (over ssh without -t)")
    left = sum(case.num_handoffs(rounds) for case in CASES.values())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_reader)
        for case in CASES.values():
            tables = case.tables(num_mib)
            async with _source(attach_path, case, tables) as session:
                for _ in range(case.num_handoffs(rounds)):
                    left -= 1
                    await _hand_over(session, case, tables, num_mib, left)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _source(
    attach_path: Path, case: PairCase, tables: PairedBlocks
) -> AsyncIterator[PrefillSession]:
    """An engine with a cache full of the pattern."""
    spec = case.source.spec(f"bench-prefill-{uuid.uuid4().hex[:12]}")
    num_blocks, _ = tables.capacities
    async with PrefillSession(attach_path, spec) as session, AsyncExitStack() as stack:
        caches, _ = await open_caches(stack, attach_path, spec, case.source, num_blocks)
        fill(caches)
        await session.register()
        await session.ready()
        yield session


async def _hand_over(
    session: PrefillSession, case: PairCase, tables: PairedBlocks, num_mib: int, left: int
) -> None:
    """Offer, print the ticket, and wait until it has been read."""
    offer = await session.offer(
        uuid.uuid4().hex,
        num_tokens=tables.num_tokens,
        block_ids={GROUP: tables.prefill},
        ttl_s=READ_WITHIN_S,
    )
    handed = Handed(case.name, num_mib, left, offer.ticket)
    if not write_text(msgspec.json.encode(handed).decode() + "\n"):
        raise _reader_gone()
    outcome = await offer.ended
    if outcome is Outcome.EXPIRED:
        raise RequestTimeout(
            f"nobody has read a handoff of '{case.name}' for {READ_WITHIN_S:g} s: {PIPE_IT}, which"
            " says what fails there"
        )
    if outcome is not Outcome.COMPLETED:
        raise PeerLost(f"a handoff of '{case.name}' was {outcome}: {LOOK_THERE}")


async def _watch_reader() -> None:
    """Raise `PeerLost` when nobody has the other end of stdout any more."""
    with select.epoll() as hang_ups:  # itself readable when there is one
        try:
            hang_ups.register(sys.stdout.fileno(), 0)
        except PermissionError:  # a file has no other end
            return
        await anyio.wait_readable(hang_ups.fileno())
    await anyio.sleep(RELEASED_WITHIN_S)
    raise _reader_gone()


def _reader_gone() -> PeerLost:
    return PeerLost(f"nobody reads the lines any more: {LOOK_THERE}")
