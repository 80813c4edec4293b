"""Reads pieces into the ranks that are here, by whichever path, for whoever asks.

Refuses to forget a piece before nothing of it can write into an engine's memory any more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.agent.process.guard import guarded
from kvbus.agent.process.service import Agent
from kvbus.agent.staging.copiers import Copiers
from kvbus.errors import KVBusError
from kvbus.geometry import GroupSpec
from kvbus.planning import Path
from kvbus_decode.config import DecodeConfig
from kvbus_decode.read.direct import DirectReader
from kvbus_decode.read.packed import Jobs, PackedReader
from kvbus_decode.read.path_choice import PathChooser
from kvbus_decode.read.piece import Piece, PieceRead

if TYPE_CHECKING:
    from kvbus.memory.paged import PagedMemory


@dataclass(slots=True)
class _InFlight:
    """Pieces that can still write into one engine."""

    reads: set[PieceRead] = field(default_factory=set)
    none_left: anyio.Event = field(default_factory=anyio.Event)


class PieceReader:
    """All pieces that are read by this agent."""

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent = agent
        self._copiers = Copiers(num_threads=config.copy_threads)
        self._chooser = PathChooser(agent, config)
        self._direct = DirectReader(agent)
        self._packed = PackedReader(agent, config, self._copiers)
        self._in_flight: dict[LocalEngine, _InFlight] = {}

    @property
    def num_slots_in_use(self) -> int:
        """Staging slots in use."""
        return self._packed.num_slots_in_use

    def open(self, piece: Piece, on_end: Callable[[PieceRead], None]) -> PieceRead:
        """A read of ``piece`` that has not started; `start` follows, after other parts of it.

        ``on_end`` is called once, when nothing of it is in flight any more.
        """

        def end(read: PieceRead) -> None:
            self._forget(read)
            on_end(read)

        read = PieceRead(piece, end)
        self._in_flight.setdefault(piece.route.engine, _InFlight()).reads.add(read)
        read.begin()
        return read

    def start(self, read: PieceRead) -> None:
        """Read into the ranks that are here, by the path that is predicted to be fastest."""
        started_at = self._agent.loop.time()
        try:
            path, jobs = self._choose(read)
        except KVBusError as error:
            read.end(0, error)
            return
        read.path = path.value
        read.finish = lambda: self._finish(read, path, self._agent.loop.time() - started_at)
        if jobs is None:
            self._direct.start(read)
        else:
            self._packed.start(read, jobs)
        read.end()

    def abort_all(self, engine: LocalEngine) -> None:
        """Nobody wants the pieces of an engine that is gone."""
        in_flight = self._in_flight.get(engine)
        for read in list(in_flight.reads) if in_flight else ():
            read.abort()
        self._copiers.forget(engine)

    async def copies_done(self, engine: LocalEngine) -> None:
        """Return when no scatter writes into ``engine``, of which none starts once it is lost."""
        await self._copiers.quiesce(engine)

    async def reads_done(self, engine: LocalEngine) -> None:
        """Return when nothing can write into ``engine`` any more."""
        in_flight = self._in_flight.get(engine)
        if in_flight is not None:
            await in_flight.none_left.wait()

    def _choose(self, read: PieceRead) -> tuple[Path, Jobs | None]:
        """The path, and the boxes of the piece if it has any."""
        path, box_bytes = self._chooser.choose(read)
        if path is Path.DIRECT:
            return path, None
        return path, self._packed.cut(read.piece, path, box_bytes=box_bytes)

    def _finish(self, read: PieceRead, path: Path, seconds: float) -> None:
        """All bytes are in the blocks: learn from it, and zero what is behind them if asked to."""
        if read.shape is not None:  # after the confirm has been sent, which is worth more
            self._agent.loop.call_soon(self._chooser.observe, read, path, seconds)
        engine = read.piece.route.engine
        for name, span in read.piece.tail.items():
            for rank in engine.ordered_ranks():
                if name in rank.num_blocks:
                    read.begin()
                    group = engine.spec.group(name)
                    self._agent.tasks.start_soon(self._zero, read, rank, group, span)

    async def _zero(
        self, read: PieceRead, rank: RankMemory, group: GroupSpec, span: tuple[int, int]
    ) -> None:
        table = read.piece.target[group.name]

        def zero(memory: "PagedMemory") -> None:
            from kvbus.memory.copying import zero_positions  # noqa: PLC0415  # imports torch

            zero_positions(memory, table, *span)

        async def run() -> None:
            engine = read.piece.route.engine
            await self._copiers.run(zero, engine=engine, memory=rank, group=group)

        await guarded(run, read.fail)
        read.end()

    def _forget(self, read: PieceRead) -> None:
        engine = read.piece.route.engine
        in_flight = self._in_flight[engine]
        in_flight.reads.discard(read)
        if not in_flight.reads:
            in_flight.none_left.set()
            del self._in_flight[engine]
