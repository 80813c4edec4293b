"""Asks a prefill agent of this machine for the memory of an engine, and maps what it passes.

Refuses what is not as the handshake said: another agent, segments that it did not name or that are
too small, files that are no memory; and a socket that is not an agent's.
"""

from collections.abc import Sequence
from pathlib import Path

from kvbus.agent.config import MEMORY_SOCKET
from kvbus.agent.loop import in_thread
from kvbus.errors import ConfigError, ErrorCode, PeerLost, ProtocolError, RemoteError
from kvbus.memory.attach import wire
from kvbus.memory.attach.channel import FrameChannel, close_fds
from kvbus.memory.attach.place import check_folder, connect_to_agent
from kvbus.memory.mapping import LentMapping
from kvbus.memory.room import check_mappings
from kvbus.protocol.attach import LendMemory, LentSegment, MemoryLent
from kvbus.protocol.message import from_body, to_body
from kvbus.protocol.peer import EngineMemory, HandshakeDone

SegmentKey = tuple[int, str]
"""A rank, and the id of a segment of it."""


def connect(path: Path) -> FrameChannel:
    """Connect to a memory socket.

    A peer of the network names the path: it must not have us talk to other programs of this
    machine. Raises `ConfigError`, and `RemoteError` when nobody listens there.
    """
    if path.name != MEMORY_SOCKET or not path.is_absolute():
        raise ConfigError(f"{path} is not the path of a memory socket")
    check_folder(path.parent)
    return FrameChannel(connect_to_agent(path))


class LentSegments:
    """The segments of one engine, asked for until all are mapped; ``mapped`` are the caller's."""

    def __init__(self, channel: FrameChannel, boot: str, done: HandshakeDone) -> None:
        self._channel, self._boot, self._done = channel, boot, done
        self._wanted = _wanted(done.memory)
        self.mapped: dict[SegmentKey, LentMapping] = {}

    async def take_all(self) -> None:
        """Return when all are mapped; raises `KVBusError`, and what sockets raise."""
        while len(self.mapped) < len(self._wanted):
            await self._channel.send(wire.encode_frame(self._question()))
            body, fds = await self._channel.receive()
            try:
                reply = wire.open_reply(wire.decode_body(body))
                await self._take(from_body(MemoryLent, reply), fds)
            finally:
                close_fds(fds)

    def _question(self) -> dict[str, object]:
        lend = LendMemory(
            agent_boot=self._boot,
            engine_id=self._done.memory.engine.engine_id,
            memory_id=self._done.memory_id,
            access=self._done.access,
            first=len(self.mapped),
        )
        return {"op": lend.op, "body": to_body(lend)}

    async def _take(self, lent: MemoryLent, fds: list[int]) -> None:
        if lent.agent_boot != self._boot:
            raise RemoteError(
                "another agent listens at the path of its memory socket here, as in another mount "
                "namespace",
                code=ErrorCode.STALE,
            )
        if len(fds) != len(lent.segments) or not fds:
            raise ProtocolError(f"{len(lent.segments)} segments came with {len(fds)} descriptors")
        for segment in lent.segments:
            self._check(segment)
        await in_thread(self._map, lent.segments, fds)

    def _check(self, segment: LentSegment) -> None:
        least_bytes = self._wanted.get((segment.rank, segment.segment_id))
        name = f"segment '{segment.segment_id}' of rank {segment.rank}"
        if least_bytes is None:
            raise ProtocolError(f"the handshake names no {name}")
        if segment.size_bytes < least_bytes:
            raise ProtocolError(
                f"{name} has {segment.size_bytes} bytes, the handshake says {least_bytes}"
            )

    def _map(self, segments: Sequence[LentSegment], fds: list[int]) -> None:
        check_mappings()
        for segment in segments:
            key = segment.rank, segment.segment_id
            if key in self.mapped:
                raise ProtocolError(f"segment '{segment.segment_id}' was lent twice")
            self.mapped[key] = LentMapping(fds.pop(0), size_bytes=segment.size_bytes)


def _wanted(memory: EngineMemory) -> dict[SegmentKey, int]:
    """The least size of each segment; raises `PeerLost` when there is none."""
    wanted = {
        (rank.rank, segment.segment_id): segment.size_bytes
        for rank in memory.ranks
        for segment in rank.segments
    }
    if not wanted:
        raise PeerLost("the engine has no segments")
    return wanted
