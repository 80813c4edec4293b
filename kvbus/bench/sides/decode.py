"""The decode side: an engine for each case, which fetches what the lines of stdin hand over."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.status import Status

from kvbus.bench.caches import arrived, open_caches, wipe
from kvbus.bench.engines import TimedFetch
from kvbus.bench.shapes import GROUP, PairedBlocks
from kvbus.bench.sides.cases import CASES, PairCase
from kvbus.bench.sides.handed import Handed, handed_over
from kvbus.bench.sides.limits import Measured
from kvbus.engine import DecodeSession, KvCache
from kvbus.errors import ConfigError, FetchFailed, KVBusError


@dataclass(frozen=True, slots=True)
class Target:
    """A decode engine of a case, its cache empty."""

    case: PairCase
    num_mib: int
    tables: PairedBlocks
    session: DecodeSession
    caches: Sequence[KvCache]

    def takes(self, handed: Handed) -> bool:
        """Whether a handoff is of this case."""
        return (self.case.name, self.num_mib) == (handed.case, handed.mib)

    async def first(self, handed: Handed) -> TimedFetch:
        """Fetch one handoff and compare every byte; raises `KVBusError`."""
        wipe(self.caches)
        fetched = await self.fetch(handed)
        if not arrived(self.caches, self.tables, source_block_size=self.case.source.block_size):
            raise KVBusError(f"a handoff of '{self.case.name}' brought wrong bytes")
        return fetched

    async def fetch(self, handed: Handed) -> TimedFetch:
        """Fetch one handoff, and time it; raises `KVBusError`."""
        block_ids, began = {GROUP: self.tables.decode}, time.perf_counter()
        fetch = self.session.fetch(
            handed.ticket, num_tokens=self.tables.num_tokens, block_ids=block_ids
        )
        try:
            fetched = await fetch.ended
        except FetchFailed as error:
            with suppress(KVBusError):  # then the offer ends by its time to live
                await fetch.cancel(release_offer=True)
            raise KVBusError(
                f"a handoff of '{self.case.name}' failed with {error.code}: {error.message}"
            ) from error
        return TimedFetch(time.perf_counter() - began, fetched)


async def decode_side(attach_path: Path, measured: list[Measured], status: Status) -> None:
    """Fetch all that stdin hands over; what was ``measured`` is there also when this raises."""
    async with AsyncExitStack() as stack:
        target: Target | None = None
        async for handed in handed_over():
            if target is not None and target.takes(handed):
                measured[-1].fetches.append(await target.fetch(handed))
                continue
            await stack.aclose()
            status.update(f"measuring {handed.case}")
            target = await stack.enter_async_context(_target(attach_path, handed))
            measured.append(Measured(target.case, await target.first(handed)))


@asynccontextmanager
async def _target(attach_path: Path, handed: Handed) -> AsyncIterator[Target]:
    case = CASES.get(handed.case)
    if case is None:
        raise ConfigError(
            f"stdin: there is no case '{handed.case}': have one version of kvbus on both machines"
        )
    spec = case.target.spec(f"bench-decode-{uuid.uuid4().hex[:12]}")
    tables = case.tables(handed.mib)
    _, num_blocks = tables.capacities
    async with DecodeSession(attach_path, spec) as session, AsyncExitStack() as stack:
        caches, _ = await open_caches(stack, attach_path, spec, case.target, num_blocks)
        await session.register()
        await session.ready()
        yield Target(case, handed.mib, tables, session, caches)
