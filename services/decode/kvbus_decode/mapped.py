"""The memory of prefill engines of this machine that is mapped, or why it is not.

A prefill agent passes it on a Unix socket. Where memory cannot be mapped, KV is read with NIXL.
"""

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
from kvbus.agent.engine import LocalEngine
from kvbus.agent.identity import machine_id, sharing
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
from kvbus.memory.mapping import SegmentMapping
from kvbus.memory.room import check_mappings
from kvbus.memory.run_copy import swap_word
from kvbus.protocol.attach import LendMemory, MemoryLent
from kvbus.protocol.message import from_body, to_body
from kvbus.protocol.peer import EngineMemory, HandshakeDone
from kvbus.protocol.tools import Sharing
from kvbus.protocol.word import WORDS_BYTES
from kvbus_decode.config import DecodeConfig

log = structlog.get_logger()

MAP_WITHIN_S = 2.0
"""A prefill agent that takes longer was stopped."""
MOST_STATES = 256
WITH_NIXL = ("direct", "staged", "packed")
OPEN = "open"

Extent = tuple[int, int]
"""First and one-past-last address of memory."""
MemoryKey = tuple[str, str]
"""An engine id and a memory id."""
SegmentKey = tuple[int, str]
"""A rank, and the id of a segment of it."""


@dataclass(slots=True, eq=False)
class Lent:
    """What a prefill agent has passed: each segment as it is mapped here, and its descriptor."""

    mappings: dict[SegmentKey, SegmentMapping] = field(default_factory=dict)
    fds: dict[SegmentKey, int] = field(default_factory=dict)
    words: SegmentMapping | None = None

    def take(self, key: SegmentKey, fd: int, size_bytes: int) -> None:
        """Map a segment, and keep a descriptor for the data process. Raises `SegmentError`."""
        self.fds[key] = os.dup(fd)
        self.mappings[key] = SegmentMapping(fd, size_bytes=size_bytes, borrowed=True)

    def defined(self, data: DataProcess, memory: EngineMemory) -> dict[int, Defined]:
        """Return what defines each rank for the data process."""
        return {rank.rank: self._define(data.new_number(), memory, rank) for rank in memory.ranks}

    def _define(self, number: int, memory: EngineMemory, rank: RankSpec) -> Defined:
        found = {key: one for key, one in self.mappings.items() if key[0] == rank.rank}
        add = AddMemory(
            memory=number,
            engine=memory.engine,
            rank=rank,
            segments=tuple(
                SegmentPart(segment_id, one.size_bytes) for (_, segment_id), one in found.items()
            ),
            direct=False,
            borrowed=True,
        )
        return Defined(add, RemoveMemory(memory=number), fds=[self.fds[key] for key in found])

    def close(self) -> None:
        """In a thread: to unmap takes tens of milliseconds a GiB."""
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        for mapping in (*self.mappings.values(), *filter(None, (self.words,))):
            mapping.close()


# A copy knows addresses only, and cannot be stopped. So these rules, here and in the data process:
#
#     the engine or its agent ends   end-of-file ──▶ `close`, DiscardMemory, then zeros under all
#                                    addresses; `closed` says why before the first one is there
#     its agent revokes our key      the same
#     its file is cut                SIGBUS in a copy ──▶ zeros there, and the copy has failed;
#                                    `closed` says so; this process hangs up, and all of it is zeros
#     no route needs it              the route is dropped: nothing changes for a fetch that still
#                                    holds this object, as its take may get a yes
#     nothing holds it               the connection is hung up, and the addresses go
#     the data process ends          the next one gets the descriptors before the next copy
#
# A copy that has read a zero for a byte therefore has failed, or finds this `closed` afterwards.
# To unmap takes tens of milliseconds a GiB, and the last holder may be the event loop. So it only
# hangs up: the task that waits for the end of the connection unmaps in a thread.
class MappedMemory:
    """Memory of all ranks of an engine, mapped read-only as long as this is held.

    ``name`` is the engine and its agent, for people; ``lender`` is the agent's process. ``ranks``
    define it for the data process. It is mapped in this process as well, for short copies:
    ``addresses`` are by rank and segment, ``extents`` are all of it, in order of address. ``words``
    are those of its engine's offers.
    """

    def __init__(
        self,
        name: str,
        lender: "Lender",
        channel: FrameChannel,
        lent: Lent,
        ranks: Mapping[int, Defined],
    ) -> None:
        self.name, self.lender, self.words, self.ranks = name, lender, lent.words, ranks
        self.addresses: dict[int, dict[str, int]] = {}
        for (rank, segment_id), mapping in lent.mappings.items():
            self.addresses.setdefault(rank, {})[segment_id] = mapping.address
        self.extents: tuple[Extent, ...] = tuple(
            sorted((one.address, one.address + one.size_bytes) for one in lent.mappings.values())
        )
        self._mappings = tuple(lent.mappings.values())  # else its addresses go
        self.closed = ""
        """Why not every byte there is the engine's own any more; empty while all are."""
        self.hang_up = weakref.finalize(self, channel.hang_up)
        """Have it unmapped, once it is closed; so it is when nothing holds it any more."""
        self.hang_up.atexit = False

    @property
    def num_bytes(self) -> int:
        return sum(end - first for first, end in self.extents)

    def has(self, number: int) -> bool:
        """Whether the data process knows one of its ranks by this number."""
        return any(defined.number == number for defined in self.ranks.values())

    def cut(self) -> None:
        """Some of it is gone; from any thread."""
        self.close("the prefill engine cut its memory")

    def close(self, reason: str) -> None:
        """No copy from it counts any more; the first reason stays."""
        self.closed = self.closed or reason


MemoryRef = weakref.ReferenceType[MappedMemory]


class Lender(Protocol):
    """The process that lends memory: `RemoteAgent`."""

    boot: str
    mapped: WeakValueDictionary[MemoryKey, MappedMemory]

    def end_memory(self, memory: MappedMemory) -> None:
        """The memory is zeros now."""
        ...


class MemoryBorrower:
    """Maps memory once for all routes that read it.

    ``states`` says of the engines that were met whether their memory is mapped here, or why not.
    """

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
        """This machine, if memory can be mapped for the engine, else empty."""
        return machine_id() if not self._closed and engine.devices == {HOST} else ""

    def sharing(self) -> Sharing:
        return sharing(closed=self._closed, engines=self.states)

    async def borrow(
        self, lender: Lender, done: HandshakeDone, engine: LocalEngine, *, within_s: float
    ) -> MappedMemory | str:
        """The memory that a handshake was about, mapped; or why it is not, and read with NIXL."""
        engine_id = done.memory.engine.engine_id
        key, name = (engine_id, done.memory_id), f"{engine_id} at {done.agent_id}"
        closed = self._reason_not_to(done, engine)
        known = lender.mapped.get(key)
        if not closed and known is not None and not known.closed:
            return known
        if not closed:
            try:
                with anyio.fail_after(min(MAP_WITHIN_S, within_s / 2)):
                    memory = await self._map(name, lender, done)
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

    def _reason_not_to(self, done: HandshakeDone, engine: LocalEngine) -> str:
        if self._closed:
            return self._closed
        if engine.devices != {HOST}:
            return "the decode engine is on a GPU"
        if done.memory_socket.closed:
            return done.memory_socket.closed
        if done.memory_socket.machine != machine_id() or not machine_id():
            return "the prefill agent is on another machine"
        return ""

    async def _map(self, name: str, lender: Lender, done: HandshakeDone) -> MappedMemory:
        """Raises `KVBusError`, and what sockets and paths raise."""
        channel, lent = _connect(Path(done.memory_socket.path)), Lent()
        data, ranks = self._agent.data, dict[int, Defined]()
        try:
            await _take_all(channel, lender.boot, done, lent)
            ranks |= lent.defined(data, done.memory)
            for defined in ranks.values():
                await data.result(defined)
            memory = MappedMemory(name, lender, channel, lent, ranks)
        except BaseException:
            channel.close()
            with anyio.CancelScope(shield=True):
                await _give_back(data, lent, ranks)
            raise
        # Neither what watches the files nor what waits for the connection may hold the memory: it
        # goes when nothing reads it any more, and hangs up then.
        self._mapped[memory] = None
        reference = weakref.ref(memory)
        for mapping in lent.mappings.values():
            if not mapping.sealed:
                mapping.survive_cuts(self._agent.bus_errors, partial(self._see_cut, reference))
        self._agent.tasks.start_soon(self._watch, channel, lent, ranks, reference)
        return memory

    async def _watch(
        self,
        channel: FrameChannel,
        lent: Lent,
        ranks: Mapping[int, Defined],
        reference: MemoryRef,
    ) -> None:
        """Wait for the end of the connection, by whichever side, and unmap in a thread then."""
        try:
            _, fds = await channel.receive()
            close_fds(fds)  # it has nothing to say, so what speaks is not an agent
        except (anyio.EndOfStream, ProtocolError):
            pass
        finally:
            self._end(reference)
            channel.close()
            with anyio.CancelScope(shield=True):
                give_back = partial(_give_back, self._agent.data, lent, ranks)
                await guarded(give_back, lambda _: None)

    def on_cut(self, cut: Cut) -> None:
        """The data process has found a segment cut, of this memory or of other memory."""
        for memory in list(self._mapped):
            if memory.has(cut.memory):
                memory.cut()
                self._end(weakref.ref(memory))

    def _see_cut(self, reference: MemoryRef) -> None:
        """In whatever thread has touched what is not there."""
        if (memory := reference()) is not None:
            memory.cut()
            self._agent.loop.call_soon_threadsafe(self._end, reference)

    def _end(self, reference: MemoryRef) -> None:
        memory = reference()
        if memory is None:
            return
        memory.close("the prefill engine or its agent has ended, or revoked our key")
        memory.hang_up()
        self._mapped.pop(memory, None)
        self._note(memory.name, memory.closed)
        memory.lender.end_memory(memory)

    def _note(self, name: str, state: str) -> None:
        """Say it once: handshakes are many."""
        if self.states.pop(name, "") != state:
            event = "mapped.opened" if state == OPEN else "mapped.closed"
            log.info(event, memory=name, reason=state)
        self.states[name] = state
        if len(self.states) > MOST_STATES:
            del self.states[next(iter(self.states))]


async def _give_back(data: DataProcess, lent: Lent, ranks: Mapping[int, Defined]) -> None:
    """Put zeros under all addresses; the data process unmaps it when no job uses it any more."""
    try:
        for defined in ranks.values():
            await data.discard(defined)
    finally:
        for defined in ranks.values():
            data.remove(defined)
        await in_thread(lent.close)


def _connect(path: Path) -> FrameChannel:
    """Connect to a memory socket.

    A peer of the network names the path: it must not have us talk to other programs of this
    machine. Raises `ConfigError`, and `RemoteError` when no agent listens there.
    """
    if path.name != MEMORY_SOCKET or not path.is_absolute():
        raise ConfigError(f"{path} is not the path of a memory socket")
    check_folder(path.parent)
    return FrameChannel(connect_to_agent(path))


async def _take_all(channel: FrameChannel, boot: str, done: HandshakeDone, lent: Lent) -> None:
    """Ask for the segments of one engine until all are ``lent``, which the caller closes, and then
    for its words: it may have none.

    Raises `KVBusError`, and what sockets raise.
    """
    wanted = _sizes(done.memory)
    has_all = False
    while not has_all:
        has_all = len(lent.mappings) == len(wanted)
        lend = LendMemory(
            agent_boot=boot,
            engine_id=done.memory.engine.engine_id,
            memory_id=done.memory_id,
            access=done.access,
            grant=done.grant,
            first=len(lent.mappings),
            words=has_all,
        )
        answer, fds = await channel.ask({"op": lend.op, "body": to_body(lend)})
        try:
            reply = from_body(MemoryLent, answer)
            if not has_all:
                _check(reply, fds, boot, wanted)
                await in_thread(_map_some, reply, fds, lent)
            elif len(fds) == 1 and swap_word is not None:
                page = partial(SegmentMapping, fds.pop(), size_bytes=WORDS_BYTES)
                with suppress(SegmentError):  # all can do without
                    lent.words = await in_thread(page)
        finally:
            close_fds(fds)


def _sizes(memory: EngineMemory) -> Mapping[SegmentKey, int]:
    """The least size of each segment; raises `PeerLost` when there is none."""
    sizes = {
        (rank.rank, segment.segment_id): segment.size_bytes
        for rank in memory.ranks
        for segment in rank.segments
    }
    if not sizes:
        raise PeerLost("the engine has no segments")
    return sizes


def _check(reply: MemoryLent, fds: list[int], boot: str, wanted: Mapping[SegmentKey, int]) -> None:
    """Raise unless it is of the agent and the segments that the handshake named."""
    if reply.agent_boot != boot:
        raise RemoteError(
            "another agent listens at the path of its memory socket here, as in another mount "
            "namespace",
            code=ErrorCode.STALE,
        )
    if len(fds) != len(reply.segments) or not fds:
        raise ProtocolError(f"{len(reply.segments)} segments came with {len(fds)} descriptors")
    for segment in reply.segments:
        least_bytes = wanted.get((segment.rank, segment.segment_id))
        name = f"segment '{segment.segment_id}' of rank {segment.rank}"
        if least_bytes is None:
            raise ProtocolError(f"the handshake names no {name}")
        if segment.size_bytes < least_bytes:
            raise ProtocolError(
                f"{name} has {segment.size_bytes} bytes, the handshake says {least_bytes}"
            )


def _map_some(reply: MemoryLent, fds: list[int], lent: Lent) -> None:
    check_mappings()
    for segment in reply.segments:
        key = segment.rank, segment.segment_id
        if key in lent.mappings:
            raise ProtocolError(f"segment '{segment.segment_id}' was lent twice")
        lent.take(key, fds.pop(0), segment.size_bytes)
