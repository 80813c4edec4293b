"""The engine's side of the attach socket."""

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import anyio

from kvbus.errors import ClosedError, KVBusError, PeerLost, ProtocolError, SegmentError
from kvbus.memory.attach.channel import (
    MAX_FDS,
    FrameChannel,
    close_fds,
    decode_body,
    encode_frame,
    open_reply,
)
from kvbus.memory.attach.socket_paths import connect_to_agent
from kvbus.protocol.attach import Hello, Welcome
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.message import from_body, to_body

Reply = tuple[dict[str, Any], list[int]]
PendingReply = asyncio.Future[Reply | None]
"""None: the agent is gone. Stays queued if its caller is cancelled."""


class AttachClient:
    """``closed`` is set when the agent disconnects."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.closed = anyio.Event()
        self._stack = AsyncExitStack()
        self._channel: FrameChannel | None = None
        self._sending = anyio.Lock()
        self._pending: deque[PendingReply] = deque()
        self._unasked_reply: Reply | None = None

    async def __aenter__(self) -> Self:
        connected = connect_to_agent(self.path)
        self._channel = channel = FrameChannel(connected)
        self._stack.callback(channel.close)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._receive_replies, channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._channel = None
        await self._stack.aclose()  # so that it does not wrap the caller's exception

    def shut_down(self) -> None:
        if self._channel is not None:
            self._channel.shut_down()

    async def call(self, message: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Return the ``ok`` of the reply; the caller keeps its descriptors.

        Raises ``RequestRefused``, ``PeerLost``, ``ClosedError``, ``ProtocolError``,
        ``SegmentError``. Cancelled while it waits, a call is still executed. Cancelled while it
        sends, it ends the connection.
        """
        answer, passed = await self.call_for_fds(message, fds)
        close_fds(passed)
        return answer

    async def call_for_fds(self, message: dict[str, Any], fds: Sequence[int] = ()) -> Reply:
        """As `call`; the caller closes the reply's descriptors."""
        if len(fds) > MAX_FDS:
            raise ProtocolError(f"a message carries at most {MAX_FDS} descriptors")
        frame = encode_frame(message)
        async with self._sending:
            pending = await self._send(frame, fds)
        try:
            reply = await pending
        except asyncio.CancelledError:
            if pending.done() and not pending.cancelled():
                _close_fds_of(pending.result())
            raise
        if reply is None:
            raise PeerLost(f"the agent at {self.path} is gone")
        try:
            return open_reply(reply[0]), reply[1]
        except KVBusError:
            _close_fds_of(reply)
            raise

    async def _send(self, frame: bytes, fds: Sequence[int]) -> PendingReply:
        if self._channel is None:
            raise ClosedError("the attach client is not open")
        try:
            await self._channel.send(frame, fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # `_receive_replies` resolves it, perhaps with the agent's last reply
        except OSError as error:
            raise SegmentError(f"cannot pass {len(fds)} descriptors: {error.strerror}") from error
        # Nothing was awaited since sending, so the reply cannot have been accepted yet.
        pending: PendingReply = asyncio.get_running_loop().create_future()
        if self.closed.is_set() or self._unasked_reply is not None:
            pending.set_result(self._unasked_reply)
        else:
            self._pending.append(pending)
        return pending

    async def _receive_replies(self, channel: FrameChannel) -> None:
        try:
            while True:
                body, fds = await channel.receive()
                try:
                    reply = decode_body(body)
                except ProtocolError:
                    close_fds(fds)
                    raise
                self._accept_reply((reply, fds))
        except (anyio.EndOfStream, ProtocolError):  # a broken format ends the connection, too
            channel.shut_down()
        finally:
            self.closed.set()
            while self._pending:
                self._accept_reply(None)

    def _accept_reply(self, reply: Reply | None) -> None:
        if not self._pending:
            _close_fds_of(reply)
            self._unasked_reply = reply
        elif (pending := self._pending.popleft()).done():
            _close_fds_of(reply)
        else:
            pending.set_result(reply)


async def query_agent(attach: Path) -> Welcome:
    """Identify an agent; raises `PeerLost`, or `RequestRefused` (``busy``) until it is ready."""
    hello = Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, engine_id="greeting", boot=uuid.uuid4().hex)
    async with AttachClient(attach) as client:
        return from_body(Welcome, await client.call({"op": hello.op, "body": to_body(hello)}))


def _close_fds_of(reply: Reply | None) -> None:
    if reply is not None:
        close_fds(reply[1])
