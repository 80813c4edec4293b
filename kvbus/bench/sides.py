"""Handoffs between two agents that already run: ``kvbus bench-prefill | kvbus bench-decode``.

A line of JSON for each goes from one side to the other. The prefill side sets the pace: it offers,
prints the ticket, and goes on when that has been read. So each side has one case in memory at a
time. Neither waits for ever for the other.
"""

import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
from rich.status import Status

from kvbus.bench.engine import BenchEngine
from kvbus.bench.figures import MAX_MIB
from kvbus.bench.report import CASES, Measured, PairCase
from kvbus.bench.shapes import GROUP, PairedBlocks
from kvbus.engine import AgentRole, Outcome
from kvbus.errors import ConfigError, FetchFailed, KVBusError, PeerLost, RequestTimeout
from kvbus.lab.pipe import Pipe
from kvbus.lab.process import Taken

PIPE = Pipe("kvbus bench-prefill", "kvbus bench-decode")
READ_WITHIN_S = 60.0
LOOK_AT_DECODE = f"look at the error of {PIPE.reader}"


class Handed(msgspec.Struct, frozen=True):
    """One handoff: its case, how large that is, its ticket, and how many lines follow."""

    case: str
    mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_MIB)]
    left: Annotated[int, msgspec.Meta(ge=0)]
    ticket: dict[str, Any]


async def prefill_side(attach_path: Path, num_mib: int, rounds: int) -> None:
    """Offer the handoffs of all cases in turn, a line on stdout each.

    Raises `RequestTimeout` when an offer is not read, `PeerLost` when who reads the lines ends, or
    the agent.
    """
    left = sum(case.num_handoffs(rounds) for case in CASES.values())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(PIPE.watch_reader)
        for case in CASES.values():
            tables = case.tables(num_mib)
            name = f"bench-prefill-{uuid.uuid4().hex[:12]}"
            num_blocks, _ = tables.capacities
            async with BenchEngine(
                attach_path,
                name,
                case.source,
                num_blocks,
                role=AgentRole.PREFILL,
                attach_timeout_s=0.0,
            ) as engine:
                for _ in range(case.num_handoffs(rounds)):
                    left -= 1
                    await _hand_over(engine, case, tables, num_mib, left)
        tasks.cancel_scope.cancel()


async def _hand_over(
    engine: BenchEngine, case: PairCase, tables: PairedBlocks, num_mib: int, left: int
) -> None:
    """Offer, print the ticket, and wait until it has been read."""
    offered = await engine.offer(
        uuid.uuid4().hex,
        num_tokens=tables.num_tokens,
        block_ids={GROUP: tables.prefill},
        ttl_s=READ_WITHIN_S,
    )
    PIPE.write(Handed(case.name, num_mib, left, offered.ticket))
    outcome = await offered.offer.ended
    if outcome is Outcome.EXPIRED:
        raise RequestTimeout(
            f"nobody has read a handoff of '{case.name}' for {READ_WITHIN_S:g} s: {LOOK_AT_DECODE}"
        )
    if outcome is not Outcome.COMPLETED:
        raise PeerLost(f"a handoff of '{case.name}' was {outcome}: {LOOK_AT_DECODE}")


async def decode_side(attach_path: Path, measured: list[Measured], status: Status) -> None:
    """Fetch all that stdin hands over; what was ``measured`` is there also when this raises."""
    async with AsyncExitStack() as stack:
        target: Target | None = None
        async for handed in PIPE.read(Handed):
            if target is None or not target.takes(handed):
                await stack.aclose()
                status.update(f"measuring {handed.case}")
                target = await stack.enter_async_context(Target(attach_path, handed))
                target.wipe()
                first = await target.read(handed)
                if not target.has(target.tables, target.case.source):
                    raise KVBusError(f"a handoff of '{handed.case}' brought wrong bytes")
                measured.append(Measured(target.case, first))
            else:
                measured[-1].fetches.append(await target.read(handed))
            if not handed.left:
                break


class Target(BenchEngine):
    """The decode engine of one case."""

    def __init__(self, attach_path: Path, handed: Handed) -> None:
        if handed.case not in CASES:
            raise ConfigError(
                f"stdin: there is no case '{handed.case}': have one version of kvbus on both"
                " machines"
            )
        self.case, self.num_mib = CASES[handed.case], handed.mib
        self.tables = self.case.tables(handed.mib)
        name, (_, num_blocks) = f"bench-decode-{uuid.uuid4().hex[:12]}", self.tables.capacities
        super().__init__(
            attach_path,
            name,
            self.case.target,
            num_blocks,
            role=AgentRole.DECODE,
            attach_timeout_s=0.0,
        )

    def takes(self, handed: Handed) -> bool:
        """Whether a handoff is of this case."""
        return (self.case.name, self.num_mib) == (handed.case, handed.mib)

    async def read(self, handed: Handed) -> Taken:
        """Fetch one handoff; raises `KVBusError`."""
        try:
            return await self.run(self.take(handed.ticket, self.tables))
        except FetchFailed as error:
            raise KVBusError(
                f"a handoff of '{self.case.name}' failed with {error.code}: {error.message}"
            ) from error
