"""Mapped memory of prefill engines on this machine; their agents pass descriptors or handles."""

import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import anyio
import structlog

from kvbus.agent.config import MEMORY_SOCKET
from kvbus.agent.identity import machine_id, sharing
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.loop import guarded, in_thread
from kvbus.agent.service import Agent
from kvbus.data.client import DataProcess, Defined
from kvbus.data.messages import HOST, AddMemory, Cut, RemoveMemory, SegmentPart
from kvbus.errors import (
    ConfigError,
    ErrorCode,
    KVBusError,
    PeerLost,
    ProtocolError,
    RemoteError,
    SegmentError,
)
from kvbus.geometry import RankSpec
from kvbus.memory.attach import FrameChannel, check_folder, close_fds, connect_to_agent
from kvbus.memory.gpu_source import GpuSource, PassedGpuMemory
from kvbus.memory.mapping import SegmentMapping
from kvbus.memory.memory_limits import check_mappings
from kvbus.memory.run_copy import swap_word
from kvbus.protocol.attach import LendMemory, LentSegment, MemoryLent
from kvbus.protocol.commit_cell import CELLS_BYTES
from kvbus.protocol.message import from_body, to_body
from kvbus.protocol.peer import EngineMemory, HandshakeDone
from kvbus.protocol.tools import Sharing
from kvbus_decode.config import DecodeConfig

log = structlog.get_logger()

MAP_WITHIN_S = 2.0
"""A slower prefill agent counts as suspended."""
MOST_STATES = 256
MAX_LENT = 4096
WITH_NIXL = ("direct", "staged", "packed")
OPEN = "open"

Extent = tuple[int, int]
"""First and one-past-last address."""
MemoryKey = tuple[str, str]
SegmentKey = tuple[int, str]


@dataclass(slots=True, eq=False)
class Lent:
    """Host memory is mapped in this process too, for short copies; GPU memory is not."""

    mappings: dict[SegmentKey, SegmentMapping] = field(default_factory=dict)
    fds: dict[SegmentKey, int] = field(default_factory=dict)
    on_gpu: dict[SegmentKey, PassedGpuMemory] = field(default_factory=dict)
    num_entries: int = 0
    cells: SegmentMapping | None = None

    def take(self, segment: LentSegment, fds: list[int]) -> None:
        """Own the entry's descriptor, the first of ``fds``, if it has one."""
        key, cuda = (segment.rank, segment.segment_id), segment.cuda
        if key in self.mappings or (key in self.on_gpu and self.on_gpu[key].is_whole):
            raise ProtocolError(f"segment '{segment.segment_id}' was lent twice")
        self.num_entries += 1
        if self.num_entries > MAX_LENT:
            raise ProtocolError(f"more than {MAX_LENT} segments and parts were lent")
        if cuda is None:
            self.fds[key] = os.dup(fds[0])
            fd = fds.pop(0)
            self.mappings[key] = SegmentMapping(fd, size_bytes=segment.size_bytes, borrowed=True)
            return
        parts = (cuda.part_bytes,) if cuda.part_bytes else ()
        source = GpuSource(cuda.device, cuda.offset_bytes, cuda.handle, parts)
        mine = fds[: len(parts)]
        if key in self.on_gpu:
            self.on_gpu[key].add(source, segment.size_bytes, mine)
        else:
            self.on_gpu[key] = PassedGpuMemory(source, segment.size_bytes, mine)
        del fds[: len(parts)]  # they belong to the memory now

    @property
    def num_whole(self) -> int:
        return len(self.mappings) + sum(one.is_whole for one in self.on_gpu.values())

    @property
    def num_bytes(self) -> int:
        host = sum(one.size_bytes for one in self.mappings.values())
        return host + sum(one.size_bytes for one in self.on_gpu.values())

    def defined(
        self, data: DataProcess, memory: EngineMemory, reader: LocalEngine
    ) -> dict[int, Defined]:
        return {
            rank.rank: self._define(data.new_number(), memory, rank, reader)
            for rank in memory.ranks
        }

    def _define(
        self, number: int, memory: EngineMemory, rank: RankSpec, reader: LocalEngine
    ) -> Defined:
        keys = [(rank.rank, segment.segment_id) for segment in rank.segments]
        fds: list[int] = []
        for key in keys:
            fds += self.on_gpu[key].fds if key in self.on_gpu else [self.fds[key]]
        add = AddMemory(
            memory=number,
            engine=memory.engine,
            rank=rank,
            segments=tuple(map(self._part, keys)),
            direct=False,
            borrowed=True,
            readers=tuple(sorted(reader.devices)) if self.on_gpu else (),
        )
        return Defined(add, RemoveMemory(memory=number), fds=fds)

    def _part(self, key: SegmentKey) -> SegmentPart:
        if key in self.on_gpu:
            one = self.on_gpu[key]
            return SegmentPart(key[1], one.size_bytes, cuda=one.source)
        return SegmentPart(key[1], self.mappings[key].size_bytes)

    def close(self) -> None:
        """Unmap. Blocks for tens of milliseconds a GiB: run it in a thread."""
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        for memory in (*self.mappings.values(), *self.on_gpu.values(), self.cells):
            if memory is not None:
                memory.close()


# A copy knows addresses only, and cannot be cancelled. These rules hold here and in the data
# process:
#
#     the engine or its agent ends   end-of-file ──▶ `close`, DiscardMemory, then zeros under all
#                                    addresses; `closed` is set before the first zero is there
#     its agent revokes our key      the same
#     its file is cut                SIGBUS in a copy ──▶ zeros there, and the copy fails; `closed`
#                                    is set, this process hangs up, and all of it becomes zeros
#     no route needs it              the route is dropped; a fetch that still holds this object
#                                    may complete its commit, so nothing changes for it
#     nothing holds it               the connection is closed, and the addresses are unmapped
#     the data process ends          the next one gets the descriptors before the next copy
#
# A copy that has read a zero instead of a byte has therefore failed, or finds `closed` set
# afterwards. To unmap takes tens of milliseconds a GiB, and the event loop may hold the last
# reference. The finalizer therefore only closes the connection, and the task that waits for its end
# unmaps in a thread.
class MappedMemory:
    """Memory of all ranks of an engine, mapped read-only while this object is held."""

    def __init__(
        self,
        name: str,
        lender: "Lender",
        channel: FrameChannel,
        lent: Lent,
        ranks: Mapping[int, Defined],
    ) -> None:
        self.name, self.lender, self.cells, self.ranks = name, lender, lent.cells, ranks
        self.addresses: dict[int, dict[str, int]] = {}
        for (rank, segment_id), mapping in lent.mappings.items():
            self.addresses.setdefault(rank, {})[segment_id] = mapping.address
        self.extents: tuple[Extent, ...] = tuple(
            sorted((one.address, one.address + one.size_bytes) for one in lent.mappings.values())
        )
        self._mappings = tuple(lent.mappings.values())  # keeps the addresses mapped
        self.num_bytes = lent.num_bytes
        self.closed = ""
        """Reason why bytes may not be the engine's, or empty."""
        self.shut_down = weakref.finalize(self, channel.shut_down)
        self.shut_down.atexit = False

    def has(self, number: int) -> bool:
        return any(defined.number == number for defined in self.ranks.values())

    def cut(self) -> None:
        """Close truncated memory. Thread-safe."""
        self.close("the prefill engine cut its memory")

    def close(self, reason: str) -> None:
        self.closed = self.closed or reason


MemoryRef = weakref.ReferenceType[MappedMemory]


class Lender(Protocol):
    boot: str
    mapped: WeakValueDictionary[MemoryKey, MappedMemory]

    def end_memory(self, memory: MappedMemory) -> None: ...


class MemoryBorrower:
    """Mapper of memory; ``states`` maps engines to `OPEN`, or to a reason."""

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent = agent
        self._mapped = weakref.WeakKeyDictionary[MappedMemory, None]()
        self._closed = "" if config.mapped else "mapped = false"
        if config.mapped and config.path in WITH_NIXL:
            self._closed = f"path = '{config.path}'"
        if self._closed:
            self._closed = f"closed by the decode agent's config ({self._closed})"
        self.states: dict[str, str] = {}

    @property
    def num_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self._mapped)

    def machine(self, engine: LocalEngine) -> str:
        return machine_id() if not self._closed else ""

    def sharing(self) -> Sharing:
        return sharing(closed=self._closed, engines=self.states)

    async def borrow(
        self, lender: Lender, done: HandshakeDone, engine: LocalEngine, *, within_s: float
    ) -> MappedMemory | str:
        """Return the mapped memory of a handshake, or the reason to read it with NIXL."""
        engine_id = done.memory.engine.engine_id
        key, name = (engine_id, done.memory_id), f"{engine_id} at {done.agent_id}"
        closed = self._reason_not_to(done)
        known = lender.mapped.get(key)
        if not closed and known is not None and not known.closed:
            return known
        if not closed:
            try:
                with anyio.fail_after(min(MAP_WITHIN_S, within_s / 2)):
                    memory = await self._map(name, lender, done, engine)
            except TimeoutError:
                closed = "the prefill agent did not lend it in time"
            except anyio.EndOfStream:
                closed = "the prefill agent hung up"
            except (KVBusError, OSError, ValueError) as error:
                closed = str(error)
            else:
                lender.mapped[key] = memory
                self._note(name, OPEN)
                return memory
        self._note(name, closed)
        return closed

    def _reason_not_to(self, done: HandshakeDone) -> str:
        if self._closed:
            return self._closed
        if done.memory_socket.closed:
            return done.memory_socket.closed
        if done.memory_socket.machine != machine_id() or not machine_id():
            return "the prefill agent is on another machine"
        return ""

    async def _map(
        self, name: str, lender: Lender, done: HandshakeDone, engine: LocalEngine
    ) -> MappedMemory:
        channel, lent = _connect(Path(done.memory_socket.path)), Lent()
        data, ranks = self._agent.data, dict[int, Defined]()
        try:
            await _take_all(channel, lender.boot, done, lent)
            _check_kind(lent, engine)
            ranks |= lent.defined(data, done.memory, engine)
            for defined in ranks.values():
                await data.result(defined)
            memory = MappedMemory(name, lender, channel, lent, ranks)
        except BaseException:
            channel.close()
            with anyio.CancelScope(shield=True):
                await _release(data, lent, ranks)
            raise
        # The file watcher and the task that waits for the connection hold no reference to the
        # memory. It is freed when nothing reads it, which closes the connection.
        self._mapped[memory] = None
        reference = weakref.ref(memory)
        for mapping in lent.mappings.values():
            if not mapping.sealed:
                mapping.survive_truncation(
                    self._agent.bus_errors, partial(self._see_cut, reference)
                )
        self._agent.tasks.start_soon(self._watch, channel, lent, ranks, reference)
        return memory

    async def _watch(
        self,
        channel: FrameChannel,
        lent: Lent,
        ranks: Mapping[int, Defined],
        reference: MemoryRef,
    ) -> None:
        try:
            _, fds = await channel.receive()
            close_fds(fds)  # only another program sends here
        except (anyio.EndOfStream, ProtocolError):
            pass
        finally:
            self._end(reference)
            channel.close()
            with anyio.CancelScope(shield=True):
                release = partial(_release, self._agent.data, lent, ranks)
                await guarded(release, lambda _: None)

    def on_cut(self, cut: Cut) -> None:
        for memory in list(self._mapped):
            if memory.has(cut.memory):
                memory.cut()
                self._end(weakref.ref(memory))

    def _see_cut(self, reference: MemoryRef) -> None:
        """Handle SIGBUS, on any thread."""
        if (memory := reference()) is not None:
            memory.cut()
            self._agent.loop.call_soon_threadsafe(self._end, reference)

    def _end(self, reference: MemoryRef) -> None:
        memory = reference()
        if memory is None:
            return
        memory.close("the prefill engine or its agent has ended, or revoked our key")
        memory.shut_down()
        self._mapped.pop(memory, None)
        self._note(memory.name, memory.closed)
        memory.lender.end_memory(memory)

    def _note(self, name: str, state: str) -> None:
        if self.states.pop(name, "") != state:
            event = "mapped.opened" if state == OPEN else "mapped.closed"
            log.info(event, memory=name, reason=state)
        self.states[name] = state
        if len(self.states) > MOST_STATES:
            del self.states[next(iter(self.states))]


async def _release(data: DataProcess, lent: Lent, ranks: Mapping[int, Defined]) -> None:
    """Replace the bytes with zeros; the data process unmaps them after their last job."""
    try:
        for defined in ranks.values():
            await data.discard(defined)
    finally:
        for defined in ranks.values():
            data.remove(defined)
        await in_thread(lent.close)


def _connect(path: Path) -> FrameChannel:
    """Connect to a memory socket and no other, as a network peer names the path."""
    if path.name != MEMORY_SOCKET or not path.is_absolute():
        raise ConfigError(f"{path} is not the path of a memory socket")
    check_folder(path.parent)
    return FrameChannel(connect_to_agent(path))


async def _take_all(channel: FrameChannel, boot: str, done: HandshakeDone, lent: Lent) -> None:
    wanted = _sizes(done.memory)
    has_all = False
    while not has_all:
        has_all = lent.num_whole == len(wanted)
        lend = LendMemory(
            agent_boot=boot,
            engine_id=done.memory.engine.engine_id,
            memory_id=done.memory_id,
            rank_secret=done.rank_secret,
            grant=done.grant,
            first=lent.num_entries,
            cells=has_all,
        )
        answer, fds = await channel.request({"op": lend.op, "body": to_body(lend)})
        try:
            reply = from_body(MemoryLent, answer)
            if not has_all:
                _check(reply, fds, boot, wanted)
                await in_thread(_map_some, reply, fds, lent)
            elif len(fds) == 1 and swap_word is not None:
                page = partial(SegmentMapping, fds.pop(), size_bytes=CELLS_BYTES)
                with suppress(SegmentError):  # cells are optional
                    lent.cells = await in_thread(page)
        finally:
            close_fds(fds)


def _sizes(memory: EngineMemory) -> Mapping[SegmentKey, int]:
    sizes = {
        (rank.rank, segment.segment_id): segment.size_bytes
        for rank in memory.ranks
        for segment in rank.segments
    }
    if not sizes:
        raise PeerLost("the engine has no segments")
    return sizes


def _check(reply: MemoryLent, fds: list[int], boot: str, wanted: Mapping[SegmentKey, int]) -> None:
    """Raise unless the agent and the segments are those of the handshake."""
    if reply.agent_boot != boot:
        raise RemoteError(
            "another agent listens at the path of its memory socket here, as in another mount "
            "namespace",
            code=ErrorCode.STALE,
        )
    num_fds = sum(one.cuda is None or one.cuda.part_bytes > 0 for one in reply.segments)
    if len(fds) != num_fds or not reply.segments:
        raise ProtocolError(f"{len(reply.segments)} segments came with {len(fds)} descriptors")
    for segment in reply.segments:
        least_bytes = wanted.get((segment.rank, segment.segment_id))
        name = f"segment '{segment.segment_id}' of rank {segment.rank}"
        if least_bytes is None:
            raise ProtocolError(f"the handshake names no {name}")
        if segment.size_bytes < least_bytes:
            raise ProtocolError(
                f"{name} has {segment.size_bytes} bytes, the handshake requires {least_bytes}"
            )


def _map_some(reply: MemoryLent, fds: list[int], lent: Lent) -> None:
    check_mappings()
    for segment in reply.segments:
        lent.take(segment, fds)


def _check_kind(lent: Lent, engine: LocalEngine) -> None:
    fits = HOST not in engine.devices if lent.on_gpu else engine.devices == {HOST}
    if not fits or (lent.on_gpu and lent.mappings):
        one = "GPU" if lent.on_gpu else "host"
        other = "host" if engine.devices == {HOST} else "GPU"
        raise SegmentError(f"the prefill engine has {one} memory, the decode engine {other} memory")
