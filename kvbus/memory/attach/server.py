"""Owns the agent's side of the attach socket: who may connect, one task a connection, the replies.

Refuses other users and more connections than the bound, with an error reply each. What a message
means is the handler's.
"""

import inspect
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.memory.attach import wire
from kvbus.memory.attach.channel import Frame, FrameChannel
from kvbus.memory.attach.path import listening_socket

_CREDENTIALS = struct.Struct("iII")
_ACCEPT_PAUSE_S = 0.1

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who connected, said by the kernel: the process as it was at that moment."""

    pid: int
    uid: int
    gid: int


@dataclass(slots=True)
class AttachCounts:
    """What happened at the door since the start."""

    num_refused_users: int = 0
    num_refused_busy: int = 0
    num_malformed: int = 0


class AttachConnection:
    """One engine process, from its connect to its end; compares and hashes by identity."""

    def __init__(self, channel: FrameChannel, peer: PeerIdentity) -> None:
        self._channel = channel
        self.peer = peer

    def hang_up(self) -> None:
        """Send the engine away; ``on_closed`` follows. Idempotent."""
        self._channel.hang_up()


Handler = Callable[
    [AttachConnection, dict[str, Any], list[int]], dict[str, Any] | Awaitable[dict[str, Any]]
]
ClosedHandler = Callable[[AttachConnection], Awaitable[None] | None]


class AttachServer:
    """Listens at ``path`` while ``serve`` runs.

    ``on_message(connection, message, fds)`` returns what ``ok`` holds, now or awaited, or raises a
    ``KVBusError`` that becomes the error reply. It owns the descriptors that it takes out of the
    list (``fds.pop()``); those that are left in it are closed after the reply is made. Messages of
    one connection are handled one after the other, those of several at the same time.
    ``on_closed(connection)`` is called once for each accepted connection, however it ends: the
    engine died or closed it, it broke the format, or the server stops.
    """

    def __init__(
        self,
        path: str | Path,
        on_message: Handler,
        on_closed: ClosedHandler,
        *,
        allowed_uids: Collection[int] | None = None,
        max_connections: int = 64,
        frame_timeout_s: float = 10.0,
    ) -> None:
        self.path = Path(path)
        self.counts = AttachCounts()
        self._on_message = on_message
        self._on_closed = on_closed
        self._allowed_uids = frozenset({os.getuid()} if allowed_uids is None else allowed_uids)
        self._max_connections = max_connections
        self._frame_timeout_s = frame_timeout_s
        self._connections: set[AttachConnection] = set()

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once clients can connect. Raises ``ConfigError``."""
        with listening_socket(self.path) as listener:
            async with anyio.create_task_group() as tasks:
                task_status.started()
                while True:
                    await self._accept_one(listener, tasks)

    async def _accept_one(self, listener: socket.socket, tasks: TaskGroup) -> None:
        await anyio.wait_readable(listener)
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors or memory: readable at once again
            log.warning("attach.accept_failed", error=str(error))
            await anyio.sleep(_ACCEPT_PAUSE_S)
            return
        peer = _identify(accepted)
        channel = FrameChannel(accepted, frame_timeout_s=self._frame_timeout_s)
        if (refusal := self._refusal(peer)) is not None:
            _turn_away(accepted, refusal)
            return
        connection = AttachConnection(channel, peer)
        self._connections.add(connection)
        tasks.start_soon(self._converse, connection, channel)

    def _refusal(self, peer: PeerIdentity) -> KVBusError | None:
        if peer.uid not in self._allowed_uids:
            self.counts.num_refused_users += 1
            log.warning("attach.user_refused", uid=peer.uid, pid=peer.pid)
            return LocalError(f"uid {peer.uid} may not attach here", uid=peer.uid)
        if len(self._connections) >= self._max_connections:
            self.counts.num_refused_busy += 1
            return LocalError(
                f"all {self._max_connections} attach connections are in use", code=ErrorCode.BUSY
            )
        return None

    # End-of-file is how an agent learns that an engine died: the kernel closes the socket of a
    # process however it ends, SIGKILL included, before its pid can be taken by another.
    #
    #     engine ends ──▶ end-of-file ──▶ `receive` raises ──▶ on_closed, once ──▶ memory discarded
    #
    # It is seen only by who reads. So messages of a connection are answered one by one by the task
    # that reads, and a handler that waits delays the news of the end of its own engine only. A
    # broken format, an `OSError` and a stop of the server end in the same `finally`. A child that
    # keeps the engine's socket hides its end; exec closes it, as Python opens sockets so.
    async def _converse(self, connection: AttachConnection, channel: FrameChannel) -> None:
        try:
            with suppress(anyio.EndOfStream, OSError):
                while await self._answer_one(connection, channel):
                    pass
        finally:
            channel.close()
            self._connections.discard(connection)
            await self._report_closed(connection)

    async def _answer_one(self, connection: AttachConnection, channel: FrameChannel) -> bool:
        """Answer the next message; return False when the connection cannot go on."""
        try:
            frame = await channel.receive()
        except ProtocolError as error:
            self.counts.num_malformed += 1
            await channel.send(wire.encode_error(error))
            return False
        try:
            reply = await self._reply(connection, frame)
        finally:
            frame.close_fds()
        await channel.send(reply)
        return True

    async def _reply(self, connection: AttachConnection, frame: Frame) -> bytes:
        try:
            message = wire.decode_body(frame.body)
        except ProtocolError as error:
            self.counts.num_malformed += 1
            return wire.encode_error(error)
        try:
            answer = self._on_message(connection, message, frame.fds)
            answer = await answer if inspect.isawaitable(answer) else answer
        except KVBusError as error:
            return wire.encode_error(error)
        except Exception:  # one bad message fails alone
            return self._internal_error(connection)
        try:
            return wire.encode_frame({"ok": answer})
        except ProtocolError:
            return self._internal_error(connection)

    def _internal_error(self, connection: AttachConnection) -> bytes:
        log.exception("attach.message_failed", pid=connection.peer.pid)
        return wire.encode_error(KVBusError("the agent failed at this message; see its log"))

    async def _report_closed(self, connection: AttachConnection) -> None:
        with anyio.CancelScope(shield=True):
            try:
                pending = self._on_closed(connection)
                if pending is not None:
                    await pending
            except Exception:  # one bad connection fails alone
                log.exception("attach.farewell_failed", pid=connection.peer.pid)


def _identify(accepted: socket.socket) -> PeerIdentity:
    credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerIdentity(*_CREDENTIALS.unpack(credentials))


def _turn_away(accepted: socket.socket, refusal: KVBusError) -> None:
    with accepted, suppress(OSError):  # a fresh socket's buffer takes a small frame whole
        accepted.send(wire.encode_error(refusal))
