"""The memory of prefill engines of this machine that is mapped here, or why it is not.

Refuses nothing to who asks for it: where memory cannot be mapped, KV is read with NIXL.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import anyio
import structlog

from kvbus.agent.engines import LocalEngine
from kvbus.agent.identity import machine_id, sharing
from kvbus.agent.loop import in_thread
from kvbus.agent.service import Agent
from kvbus.agent.slots import HOST
from kvbus.errors import KVBusError, ProtocolError
from kvbus.memory.attach.channel import FrameChannel, close_fds
from kvbus.memory.mapping import LentMapping
from kvbus.protocol.attach import MemorySocket
from kvbus.protocol.peer import HandshakeDone
from kvbus.protocol.status import Sharing
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.lend_client import LentSegments, connect
from kvbus_decode.peer.mapped_memory import MappedMemory

log = structlog.get_logger()

MAP_WITHIN_S = 2.0
"""A prefill agent that takes longer was stopped."""
MOST_STATES = 256
WITH_NIXL = ("direct", "packed", "reordered")
OPEN = "open"

Place = tuple[str, str, str]
"""An agent's boot id, an engine of it, and the memory of that."""
MemoryHook = Callable[[MappedMemory], None]
MemoryRef = weakref.ReferenceType[MappedMemory]


class MemoryBorrower:
    """Maps memory once for all routes that read it; ``on_end`` is told when it is zeros.

    ``states`` says of the engines that were met whether their memory is mapped here, or why not.
    """

    def __init__(self, agent: Agent, config: DecodeConfig, on_end: MemoryHook) -> None:
        self._agent, self._config, self._on_end = agent, config, on_end
        self._known = weakref.WeakValueDictionary[Place, MappedMemory]()
        self.states: dict[str, str] = {}

    @property
    def num_bytes(self) -> int:
        """How much is mapped here now."""
        return sum(memory.num_bytes for memory in self._known.values())

    async def borrow(
        self, boot: str, done: HandshakeDone, engine: LocalEngine, *, within_s: float
    ) -> MappedMemory | str:
        """The memory that a handshake was about, mapped; or why it is not, and read with NIXL."""
        engine_id = done.memory.engine.engine_id
        place, who = (boot, engine_id, done.memory_id), f"{engine_id} at {done.agent_id}"
        socket, closed = done.memory_socket or MemorySocket(), self._reason_not_to(done, engine)
        known = self._known.get(place)
        if not closed and known is not None and known.is_open:
            return known
        if not closed:
            try:
                with anyio.fail_after(min(MAP_WITHIN_S, within_s / 2)):
                    memory = await self._map(Path(socket.path), who, boot, done)
            except TimeoutError:
                closed = "the prefill agent did not lend it in time"
            except anyio.EndOfStream:
                closed = "the prefill agent hung up"
            except (KVBusError, OSError, ValueError) as error:
                closed = str(error)
            else:
                self._known[place] = memory
                self._note(who, OPEN)
                return memory
        self._note(who, closed)
        return closed

    def machine(self, engine: LocalEngine) -> str:
        """This machine, if memory can be mapped for the engine, else empty."""
        can_map = not self._closed_by_config() and engine.devices == {HOST}
        return machine_id() if can_map else ""

    def sharing(self) -> Sharing:
        """What the status says of it."""
        return sharing(closed=self._closed_by_config(), engines=self.states)

    def _closed_by_config(self) -> str:
        if not self._config.mapped:
            return "closed by the decode agent's config (mapped = false)"
        path = self._config.path
        return f"closed by the decode agent's config (path = '{path}')" if path in WITH_NIXL else ""

    def _reason_not_to(self, done: HandshakeDone, engine: LocalEngine) -> str:
        """Why it is not even tried; empty when it is."""
        socket, closed = done.memory_socket, self._closed_by_config()
        reasons = {
            closed: bool(closed),
            "the decode engine is on a GPU": engine.devices != {HOST},
            "the prefill agent is of a version that lends nothing": socket is None,
        }
        if socket is not None:
            reasons[socket.closed] = bool(socket.closed)
            reasons["the prefill agent is on another machine"] = not is_near(done)
        return next((reason for reason, applies in reasons.items() if applies), "")

    async def _map(self, path: Path, who: str, boot: str, done: HandshakeDone) -> MappedMemory:
        """Raises `KVBusError`, and what sockets and paths raise."""
        channel = connect(path)
        lent = LentSegments(channel, boot, done)
        try:
            await lent.take_all()
            memory = MappedMemory(who, channel, lent.mapped)
        except BaseException:
            for mapping in lent.mapped.values():
                mapping.close()
            channel.close()
            raise
        self._begin(memory, channel, lent)
        return memory

    # Neither who watches the files nor who waits for the connection may hold the memory: it goes
    # when nobody reads it any more, and hangs up then.
    def _begin(self, memory: MappedMemory, channel: FrameChannel, lent: LentSegments) -> None:
        reference, tasks = weakref.ref(memory), self._agent.tasks
        on_cut = partial(_see_cut, reference, self._agent.loop, self._end)
        for mapping in lent.mapped.values():
            if not mapping.sealed:
                mapping.survive_cuts(self._agent.bus_errors, on_cut)
        tasks.start_soon(self._watch, channel, tuple(lent.mapped.values()), reference)
        tasks.start_soon(_populate, memory)

    async def _watch(
        self, channel: FrameChannel, mappings: Iterable[LentMapping], reference: MemoryRef
    ) -> None:
        """Wait for the end of the connection, by whichever side, and unmap in a thread then."""
        try:
            _, fds = await channel.receive()
            close_fds(fds)  # who speaks unasked is as good as gone
        except (anyio.EndOfStream, ProtocolError):
            pass
        finally:
            if (memory := reference()) is not None:
                self._end(memory)
            del memory
            channel.close()
            with anyio.CancelScope(shield=True):
                await in_thread(_unmap, mappings)

    def _end(self, memory: MappedMemory) -> None:
        memory.close("the prefill engine, or its agent, has ended")
        memory.hang_up()
        for place in [place for place, known in self._known.items() if known is memory]:
            del self._known[place]
        self._note(memory.who, memory.closed)
        self._on_end(memory)

    def _note(self, who: str, state: str) -> None:
        """Say it once: handshakes are many."""
        if self.states.pop(who, "") != state:
            event = "mapped.opened" if state == OPEN else "mapped.closed"
            log.info(event, memory=who, reason=state)
        self.states[who] = state
        while len(self.states) > MOST_STATES:
            del self.states[next(iter(self.states))]


def _unmap(mappings: Iterable[LentMapping]) -> None:
    for mapping in mappings:
        mapping.close()


async def _populate(memory: MappedMemory) -> None:
    await anyio.to_thread.run_sync(memory.populate, abandon_on_cancel=True)


def is_near(done: HandshakeDone) -> bool:
    """Whether the prefill agent has said that it is on this machine."""
    socket = done.memory_socket
    return socket is not None and socket.machine == machine_id() != ""


def _see_cut(reference: MemoryRef, loop: asyncio.AbstractEventLoop, end: MemoryHook) -> None:
    """In whatever thread has touched what is not there."""
    if (memory := reference()) is not None:
        memory.cut()
        loop.call_soon_threadsafe(end, memory)
