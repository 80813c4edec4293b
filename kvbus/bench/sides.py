"""Handoffs between two running agents: ``kvbus bench-prefill | kvbus bench-decode``.

The prefill side continues after each read, so that a side has one case in memory at a time.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec

from kvbus.bench import pipe
from kvbus.bench.bench_engine import (
    BIG,
    GROUP,
    HND_1,
    LAYERED,
    NHD_1,
    SMALL,
    BenchEngine,
    PairedBlocks,
    Shape,
    contiguous,
    scattered_tokens,
)
from kvbus.bench.figures import MAX_MIB, Figure, milliseconds, percentiles, speed, stages
from kvbus.bench.sheet import Sheet
from kvbus.engine import AgentRole, Outcome
from kvbus.errors import ConfigError, FetchFailed, KVBusError, PeerLost, RequestTimeout
from kvbus.histograms import quantile
from kvbus.lab.process import TimedFetch
from kvbus.output import waiting_for

MIB = 1 << 20
READ_WITHIN_S = 60.0
SEE_DECODE = f"see the error of {pipe.READER}"
SHOWN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class PairCase:
    source: Shape
    target: Shape
    times: int = 1
    is_one: bool = False
    in_order: bool = False

    def tables(self, num_mib: int) -> PairedBlocks:
        most_bytes = 1 if self.is_one else num_mib * MIB
        num_blocks = max(1, most_bytes // self.source.block_bytes)
        if self.in_order:
            return contiguous(num_blocks, self.source)
        return scattered_tokens(self.source, self.target, num_blocks * self.source.block)

    def num_handoffs(self, rounds: int) -> int:
        """The first one compares every byte, and is not counted."""
        return 1 + rounds * self.times


CASES: Mapping[str, PairCase] = {
    "one-block": PairCase(SMALL, SMALL, times=10, is_one=True, in_order=True),
    "hnd-to-nhd": PairCase(HND_1, NHD_1),
    "runs-16k": PairCase(LAYERED, LAYERED),
    "runs-256k": PairCase(BIG, BIG),
    "in-order": PairCase(BIG, BIG, in_order=True),
}


class BenchHandoff(msgspec.Struct, frozen=True):
    case: str
    mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_MIB)]
    left: Annotated[int, msgspec.Meta(ge=0)]
    ticket: dict[str, Any]


def _engine(attach_path: Path, shape: Shape, num_blocks: int, role: AgentRole) -> BenchEngine:
    name = f"bench-{role}-{uuid.uuid4().hex[:12]}"
    return BenchEngine(attach_path, name, shape, num_blocks, role=role, attach_timeout_s=0.0)


async def prefill_side(attach_path: Path, num_mib: int, rounds: int) -> None:
    """Raises `RequestTimeout` if an offer is not read, `PeerLost` if reader or agent ends."""
    left = sum(case.num_handoffs(rounds) for case in CASES.values())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipe.watch_reader)
        for name, case in CASES.items():
            tables = case.tables(num_mib)
            num_blocks, _ = tables.capacities
            with waiting_for(f"{pipe.READER} to read the handoffs of {name}"):
                async with _engine(
                    attach_path, case.source, num_blocks, AgentRole.PREFILL
                ) as engine:
                    for _ in range(case.num_handoffs(rounds)):
                        left -= 1
                        await _hand_over(engine, tables, BenchHandoff(name, num_mib, left, {}))
        tasks.cancel_scope.cancel()


async def _hand_over(engine: BenchEngine, tables: PairedBlocks, handoff: BenchHandoff) -> None:
    offered = await engine.offer(
        uuid.uuid4().hex,
        num_tokens=tables.num_tokens,
        block_ids={GROUP: tables.prefill},
        ttl_s=READ_WITHIN_S,
    )
    pipe.write(msgspec.structs.replace(handoff, ticket=offered.ticket))
    outcome = await offered.offer.ended
    if outcome is Outcome.EXPIRED:
        raise RequestTimeout(
            f"nobody has read a handoff of '{handoff.case}' for {READ_WITHIN_S:g} s: {SEE_DECODE}"
        )
    if outcome is not Outcome.COMPLETED:
        raise PeerLost(f"a handoff of '{handoff.case}' was {outcome}: {SEE_DECODE}")


async def decode_side(attach_path: Path, sheet: Sheet) -> int:
    """Return the number of handoffs; raise `KVBusError` if one fails or brings wrong bytes."""
    lines, num_read = pipe.read(BenchHandoff), 0
    with waiting_for(f"a line of {pipe.WRITER}"):
        handoff = await anext(lines)
    sheet.progress.expect(handoff.left + 1)
    while True:
        name, num_mib = handoff.case, handoff.mib
        if name not in CASES:
            raise ConfigError(
                f"stdin: there is no case '{name}': have one version of kvbus on both machines"
            )
        sheet.begin(name)
        sheet.progress.note(f"measuring {name}")
        case, timed = CASES[name], list[TimedFetch]()
        tables = case.tables(num_mib)
        _, num_blocks = tables.capacities
        async with _engine(attach_path, case.target, num_blocks, AgentRole.DECODE) as engine:
            engine.wipe()
            first = await _fetch(engine, tables, handoff)
            sheet.progress.advance()
            if not engine.has(tables, case.source):
                raise KVBusError(f"a handoff of '{name}' brought wrong bytes")
            try:
                while handoff.left:
                    handoff = await anext(lines)
                    if (handoff.case, handoff.mib) != (name, num_mib):
                        break
                    timed.append(await _fetch(engine, tables, handoff))
                    sheet.progress.advance()
                else:
                    return num_read + 1 + len(timed)
            finally:
                sheet.show([milliseconds("first handoff", first.seconds), *_figures(timed)])
        num_read += 1 + len(timed)


async def _fetch(engine: BenchEngine, tables: PairedBlocks, handoff: BenchHandoff) -> TimedFetch:
    try:
        return await engine.fetch_timed(handoff.ticket, tables)
    except FetchFailed as error:
        raise KVBusError(
            f"a handoff of '{handoff.case}' failed with {error.code}: {error.message}"
        ) from error


def _figures(timed: Sequence[TimedFetch]) -> Iterator[Figure]:
    for path in sorted({one.fetched.path for one in timed}):
        some = [one for one in timed if one.fetched.path == path]
        seconds = [one.seconds for one in some]
        p50_s = quantile(seconds, 0.5)
        yield speed(path, some[0].fetched.num_bytes, p50_s)
        yield from percentiles(path, seconds)
        yield Figure(f"{path} handoffs", len(some))
        for stage in stages(some, f"  {path}: "):
            if stage.value >= SHOWN_SHARE * p50_s * 1e3:
                yield stage
