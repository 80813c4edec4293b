"""The agent's side of a Unix socket."""

import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.memory.attach.channel import (
    FRAME_TIMEOUT_S,
    FrameChannel,
    close_fds,
    decode_body,
    encode_error,
    encode_frame,
)
from kvbus.memory.attach.socket_paths import PeerIdentity, listening_at

_ACCEPT_PAUSE_S = 0.1

log = structlog.get_logger()


class AttachConnection(FrameChannel):
    """After ``shut_down``, ``on_closed`` follows."""

    def __init__(self, accepted: socket.socket, *, frame_timeout_s: float) -> None:
        super().__init__(accepted, frame_timeout_s=frame_timeout_s)
        self.peer = PeerIdentity.of(accepted)
        self.has_ended = False


class PassingAnswer(NamedTuple):
    """The server closes ``fds``."""

    ok: dict[str, Any]
    fds: list[int]


Answer = dict[str, Any] | PassingAnswer
Handler = Callable[[AttachConnection, dict[str, Any], list[int]], Awaitable[Answer]]
OnRefusal = Callable[[AttachConnection, str, KVBusError], object]


class AttachServer:
    """``on_message(connection, message, fds)`` owns the descriptors that it pops from ``fds``.

    Messages of a connection are handled in order. ``on_closed`` is called once per accepted
    connection.
    """

    def __init__(
        self,
        path: str | Path,
        on_message: Handler,
        on_closed: Callable[[AttachConnection], object],
        *,
        on_refusal: OnRefusal = lambda *_: None,
        max_connections: int = 64,
        max_process_connections: int = 48,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
    ) -> None:
        self.path = Path(path)
        self.num_refused = self.num_malformed = 0
        self._on_message = on_message
        self._on_closed, self._on_refusal = on_closed, on_refusal
        self._max_connections = max_connections
        self._max_process_connections = max_process_connections
        self._frame_timeout_s = frame_timeout_s
        self._connections: set[AttachConnection] = set()

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Raises ``ConfigError``."""
        with listening_at(self.path) as listener:
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
        except OSError as error:  # out of descriptors or memory: still readable
            log.warning("attach.accept_failed", error=str(error))
            await anyio.sleep(_ACCEPT_PAUSE_S)
            return
        connection = AttachConnection(accepted, frame_timeout_s=self._frame_timeout_s)
        if (refusal := self._refusal(connection.peer)) is not None:
            self.num_refused += 1
            with accepted, suppress(OSError):  # a small frame fits into a new socket's buffer
                accepted.send(encode_error(refusal))
            return
        self._connections.add(connection)
        tasks.start_soon(self._converse, connection)

    def _refusal(self, peer: PeerIdentity) -> KVBusError | None:
        if peer.uid != os.geteuid():
            log.warning("attach.user_refused", path=str(self.path), uid=peer.uid, pid=peer.pid)
            return LocalError(f"uid {peer.uid} may not attach here", uid=peer.uid)
        if len(self._connections) >= self._max_connections:
            return LocalError(
                f"all {self._max_connections} attach connections are in use", code=ErrorCode.BUSY
            )
        limit, pid = self._max_process_connections, peer.pid
        # pid 0 is any process of another PID namespace: the kernel hides its pid
        if pid and sum(other.peer.pid == pid for other in self._connections) >= limit:
            return LocalError(
                f"process {pid} has {limit} attach connections, which is the limit",
                code=ErrorCode.BUSY,
            )
        return None

    # An agent detects a dead engine by end-of-file. The kernel closes the socket of a process
    # however it ends, SIGKILL included, before another process can take its pid.
    #
    #     engine ends ──▶ end-of-file ──▶ `receive` raises ──▶ on_closed, once ──▶ memory discarded
    #
    # Only a reader sees it. So the task that reads a connection also answers its messages, one by
    # one. A handler that waits delays only the detection of its own engine's end. A broken format,
    # an `OSError` and a stop of the server end in the same `finally`. A child process that keeps
    # the engine's socket hides the engine's end; exec closes the socket, as Python opens sockets
    # so.
    async def _converse(self, connection: AttachConnection) -> None:
        try:
            with suppress(anyio.EndOfStream, OSError):
                while await self._answer_one(connection):
                    pass
            connection.has_ended = True
        finally:
            connection.close()
            self._connections.discard(connection)
            try:
                self._on_closed(connection)
            except Exception:  # one bad connection fails alone
                log.exception("attach.farewell_failed", pid=connection.peer.pid)

    async def _answer_one(self, connection: AttachConnection) -> bool:
        try:
            body, fds = await connection.receive()
        except ProtocolError as error:
            self.num_malformed += 1
            await connection.send(encode_error(error))
            return False
        passed: list[int] = []
        try:
            reply = await self._reply(connection, body, fds, passed)
            close_fds(fds)
            await connection.send(reply, passed)
        finally:
            close_fds([*fds, *passed])
        return True

    async def _reply(
        self, connection: AttachConnection, body: bytes, fds: list[int], passed: list[int]
    ) -> bytes:
        try:
            message = decode_body(body)
        except ProtocolError as error:
            self.num_malformed += 1
            return encode_error(error)
        try:
            answer = await self._on_message(connection, message, fds)
        except KVBusError as error:
            self._on_refusal(connection, str(message.get("op")), error)
            return encode_error(error)
        except Exception:  # one bad message fails alone
            return self._internal_error(connection)
        if isinstance(answer, PassingAnswer):
            passed += answer.fds
            answer = answer.ok
        try:
            return encode_frame({"ok": answer})
        except ProtocolError:
            close_fds(passed)
            return self._internal_error(connection)

    def _internal_error(self, connection: AttachConnection) -> bytes:
        log.exception("attach.message_failed", pid=connection.peer.pid)
        return encode_error(KVBusError("the agent failed at this message; see its log"))
