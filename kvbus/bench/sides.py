"""Handoffs between two agents that already run: ``kvbus bench-prefill | kvbus bench-decode``.

A line of JSON for each goes from one side to the other. The prefill side sets the pace: it offers,
prints the ticket, and goes on when that has been read. So each side has one case in memory at a
time. Neither waits for ever for the other.
"""

import os
import select
import sys
import uuid
from collections.abc import AsyncIterator
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
from kvbus.lab.process import Taken
from kvbus.output import write_text

MAX_LINE_BYTES = 1 << 20
READ_WITHIN_S = 60.0
NEXT_WITHIN_S = 120.0
"""Longer than the prefill side waits for its reader, and than a person for a password of ssh."""
RELEASED_WITHIN_S = 2.0
"""After the reader of the lines has ended: it may have had all of them."""
PIPE_IT = "pipe what kvbus bench-prefill prints into kvbus bench-decode"
LOOK_AT_DECODE = "look at the error of kvbus bench-decode"


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
    if sys.stdout is None or sys.stdout.isatty():
        raise ConfigError(f"stdout is no pipe: {PIPE_IT} (over ssh without -t)")
    left = sum(case.num_handoffs(rounds) for case in CASES.values())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_reader)
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
    handed = Handed(case.name, num_mib, left, offered.ticket)
    if not write_text(msgspec.json.encode(handed).decode() + "\n"):
        raise _reader_gone()
    outcome = await offered.offer.ended
    if outcome is Outcome.EXPIRED:
        raise RequestTimeout(
            f"nobody has read a handoff of '{case.name}' for {READ_WITHIN_S:g} s: {PIPE_IT}, which"
            " says what fails there"
        )
    if outcome is not Outcome.COMPLETED:
        raise PeerLost(f"a handoff of '{case.name}' was {outcome}: {LOOK_AT_DECODE}")


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
    return PeerLost(f"nobody reads the lines any more: {LOOK_AT_DECODE}")


async def decode_side(attach_path: Path, measured: list[Measured], status: Status) -> None:
    """Fetch all that stdin hands over; what was ``measured`` is there also when this raises."""
    async with AsyncExitStack() as stack:
        target: Target | None = None
        async for handed in handed_over():
            if target is not None and target.takes(handed):
                measured[-1].fetches.append(await target.read(handed))
                continue
            await stack.aclose()
            status.update(f"measuring {handed.case}")
            target = await stack.enter_async_context(Target(attach_path, handed))
            target.wipe()
            first = await target.read(handed)
            if not target.has(target.tables, target.case.source):
                raise KVBusError(f"a handoff of '{handed.case}' brought wrong bytes")
            measured.append(Measured(target.case, first))


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


async def handed_over() -> AsyncIterator[Handed]:
    """What the lines of stdin hand over, until the last one.

    Raises `ConfigError` for a line that is none, `PeerLost` when stdin ends too early, and
    `RequestTimeout` when nothing comes.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(f"stdin is no pipe: {PIPE_IT}")
    lines, left = _lines(sys.stdin.fileno()), 1
    while left:
        with anyio.move_on_after(NEXT_WITHIN_S) as waiting:
            line = await anext(lines, b"")
        if waiting.cancelled_caught:
            raise RequestTimeout(
                f"no line came for {NEXT_WITHIN_S:g} s: look at kvbus bench-prefill, and at its"
                " agent"
            )
        if not line:
            raise PeerLost(
                "stdin ended before the last handoff: look at the error of kvbus bench-prefill"
            )
        try:
            handed = msgspec.json.decode(line, type=Handed)
        except msgspec.DecodeError as error:
            text = line[:40].decode(errors="replace")
            message = f"stdin: {text!r} is no line of kvbus bench-prefill: {error}"
            raise ConfigError(message) from error
        left = handed.left
        yield handed


async def _lines(fd: int) -> AsyncIterator[bytes]:
    """Whole lines. No thread reads them: it could not be ended while nothing comes."""
    buffer = b""
    while piece := await _read(fd):
        *whole, buffer = (buffer + piece).split(b"\n")
        if len(buffer) > MAX_LINE_BYTES:
            whole.append(buffer)
        for line in whole:
            yield line


async def _read(fd: int) -> bytes:
    try:
        await anyio.wait_readable(fd)
    except PermissionError:  # it is a file, which never lets wait
        await anyio.lowlevel.checkpoint()
    return os.read(fd, MAX_LINE_BYTES)
