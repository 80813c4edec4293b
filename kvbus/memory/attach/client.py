"""The engine's side of the attach socket: requests, their replies in order, the agent's end."""

import asyncio
import os
import socket
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self

import anyio

from kvbus.errors import ClosedError, PeerLost, ProtocolError, SegmentError
from kvbus.memory.attach.channel import (
    MAX_FDS,
    FrameChannel,
    close_fds,
    decode_body,
    encode_frame,
    open_reply,
)
from kvbus.memory.attach.place import PeerIdentity, connect_to_agent
from kvbus.protocol.attach import Hello, Welcome
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.message import from_body, to_body

_SO_PEERPIDFD = 77
"""Of Linux 6.5: it names processes of other namespaces, too."""

PendingReply = asyncio.Future[dict[str, Any] | None]
"""Of one message, None when the agent is gone; stays in line when its caller gives up."""


class AttachClient:
    """A connection to the agent at ``path``, open within ``async with``.

    ``closed`` is set when the agent has gone away or the block was left. Entering raises
    ``PeerLost`` when no agent listens there, ``RequestRefused`` (busy) when it has a full queue and
    ``ConfigError`` when who listens is of another user: nothing was sent then.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.closed = anyio.Event()
        self._stack = AsyncExitStack()
        self._channel: FrameChannel | None = None
        self._sending = anyio.Lock()
        self._pending: deque[PendingReply] = deque()
        self._unasked_reply: dict[str, Any] | None = None
        self._pidfd: int | None = None

    async def __aenter__(self) -> Self:
        connected = connect_to_agent(self.path)
        self._channel = channel = FrameChannel(connected)
        self._stack.callback(channel.close)
        if (pidfd := _pidfd(connected)) is not None:
            self._pidfd = pidfd
            self._stack.callback(os.close, pidfd)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._receive_replies, channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._channel = self._pidfd = None
        await self._stack.aclose()  # told of no exception, its tasks do not wrap the caller's

    def hang_up(self) -> None:
        """The agent sees the end from now on; the block is still to be left."""
        if self._channel is not None:
            self._channel.hang_up()

    async def process_ended(self, within_s: float) -> bool:
        """Whether the agent's process, and not only its connection, is gone within that time.

        One that the kernel does not name here never is.
        """
        with anyio.move_on_after(within_s):
            if self._pidfd is not None:
                await anyio.wait_readable(self._pidfd)
                return True
            await anyio.sleep_forever()
        return False

    async def call(self, message: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Send a message, with descriptors that stay the caller's; return what ``ok`` holds.

        Raises ``RequestRefused``, ``PeerLost``, ``ClosedError``, ``ProtocolError`` for a message
        that cannot be sent and ``SegmentError`` for a descriptor that cannot. A call that is
        cancelled while it waits for the reply is still done; one that is cancelled while it is
        sent ends the connection.
        """
        if len(fds) > MAX_FDS:
            raise ProtocolError(f"a message carries at most {MAX_FDS} descriptors")
        frame = encode_frame(message)
        async with self._sending:
            pending = await self._send(frame, fds)
        if (reply := await pending) is None:
            raise PeerLost(f"the agent at {self.path} is gone")
        return open_reply(reply)

    async def _send(self, frame: bytes, fds: Sequence[int]) -> PendingReply:
        if self._channel is None:
            raise ClosedError("the attach client is not open")
        try:
            await self._channel.send(frame, fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the receiver resolves it, maybe with the agent's last words
        except OSError as error:
            raise SegmentError(f"cannot pass {len(fds)} descriptors: {error.strerror}") from error
        # The reply cannot come first, as nothing was awaited since sending.
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
                close_fds(fds)
                self._accept_reply(decode_body(body))
        except (anyio.EndOfStream, ProtocolError):  # a broken format is as good as gone
            channel.hang_up()
        finally:
            self.closed.set()
            while self._pending:
                self._accept_reply(None)

    def _accept_reply(self, reply: dict[str, Any] | None) -> None:
        if not self._pending:
            self._unasked_reply = reply
        elif not (pending := self._pending.popleft()).done():
            pending.set_result(reply)


async def greet(attach: Path) -> Welcome:
    """Who listens at ``attach``, and where its other sockets are.

    Raises `PeerLost` or `RequestRefused` (``busy``) while it is not ready.
    """
    hello = Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, engine_id="greeting", boot=uuid.uuid4().hex)
    async with AttachClient(attach) as client:
        return from_body(Welcome, await client.call({"op": hello.op, "body": to_body(hello)}))


def _pidfd(connected: socket.socket) -> int | None:
    """What is readable once the process at the other end is gone; None if the kernel cannot say."""
    with suppress(OSError):
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with suppress(OSError):
        return os.pidfd_open(PeerIdentity.of(connected).pid)
    return None
