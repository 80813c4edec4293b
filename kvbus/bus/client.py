"""Client side of requests: a DEALER socket.

A late reply never causes a resend: a live connection delivers all it accepted. A new connection
gets the pending requests again, unless the server process is a new one.
"""

import asyncio
import math
import secrets
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio

from kvbus.bus.connection import WatchedConnection
from kvbus.bus.sockets import (
    BusContext,
    SocketOptions,
    max_request_bytes,
    new_context,
    open_dealer,
)
from kvbus.bus.trust import ClientCurve
from kvbus.errors import (
    ClosedError,
    ErrorCode,
    KVBusError,
    LocalError,
    PeerLost,
    ProtocolError,
    RequestTimeout,
)
from kvbus.protocol.engine import Ping
from kvbus.protocol.envelope import Notice, Reply, RequestFrame, decode, encode_request, too_large
from kvbus.protocol.message import R, Request, from_body, refusal

PAUSE_S = 1.0

_T = TypeVar("_T")
OnReply = Callable[[R | KVBusError], None]


def new_boot_id() -> str:
    return uuid.uuid4().hex


def new_secret() -> str:
    """Return 128 random bits in hexadecimal; unlike a boot id, they prove the sender's identity."""
    return secrets.token_hex(16)


@dataclass(slots=True, eq=False)
class _Pending:
    message: Request[Any]
    frame: bytes
    on_reply: OnReply[Any]
    timeout_s: float
    ends_at: float
    on_sent: Callable[[], None] | None


class RequestClient(WatchedConnection):
    """Client of one server. ``boot`` must be unique among the server's clients.

    ``on_gone`` is called when the server's process is gone; pending requests keep waiting. A
    callback's exception goes to ``on_fault``; without one it ends `run`.
    """

    def __init__(
        self,
        context: BusContext,
        endpoint: str,
        *,
        boot: str,
        on_notice: Callable[[Notice], None] | None = None,
        on_boot: Callable[[str], None] | None = None,
        on_gone: Callable[[str], None] | None = None,
        on_moved: Callable[[str], None] | None = None,
        on_fault: Callable[[Exception], None] | None = None,
        max_pending: int = 1024,
        ping_s: float = 2.0,
        options: SocketOptions | None = None,
    ) -> None:
        options = options or SocketOptions()
        super().__init__(context, open_dealer(context, endpoint, options), endpoint, options)
        self.boot = boot
        self._report_notice, self._report_boot, self._report_gone = on_notice, on_boot, on_gone
        self._report_moved = on_moved
        self._on_fault = on_fault or self._fail
        self._max_pending, self._ping_s = max_pending, ping_s
        self._max_bytes = max_request_bytes(endpoint)
        self._pending: dict[int, _Pending] = {}
        self._unsent: dict[int, None] = {}
        self.closed_by: KVBusError | None = None
        self._secret = new_secret()
        self._last_id = secrets.randbelow(2**52)  # an integer that a float holds exactly
        self._was_connected = False
        self._check_at = math.inf
        self._was_paused = False
        self._ping_at = math.inf
        self._silent_since, self._num_unanswered = math.inf, 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    # A pause of this process lengthens the time since the last message, although the peer is
    # healthy. So silence is measured in unanswered pings: a pause adds none.
    @property
    def silent_s(self) -> float:
        """Seconds without an answer to pings."""
        has_answered = self.received_at != self._silent_since
        return 0.0 if has_answered else self._num_unanswered * self._ping_s

    def note_alive(self, boot: str) -> None:
        if boot == self.peer_boot:
            self.received_at = asyncio.get_running_loop().time()
        elif self.peer_boot is not None:
            self._ping()

    async def request(self, message: Request[R], *, timeout_s: float) -> R:
        """Raise the errors of `send`. A cancelled request may still be executed."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def settle(outcome: R | KVBusError) -> None:
            if future.done():
                return
            if isinstance(outcome, KVBusError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        request_id = self.send(message, timeout_s=timeout_s, on_reply=settle)
        try:
            return await future
        finally:
            self.take_back(request_id)

    def send(
        self,
        message: Request[R],
        *,
        timeout_s: float,
        on_reply: OnReply[R],
        on_sent: Callable[[], None] | None = None,
    ) -> int:
        """Send a request and return its id. ``on_reply`` gets one reply or error.

        ``on_sent`` is called, possibly at once, when a connection first accepts the request.

        Errors passed to ``on_reply``:

            RequestRefused             error reply
            ProtocolError              invalid reply
            RequestTimeout             no reply within ``timeout_s``, which may be `math.inf`
            PeerLost                   the server restarted as a new process
            ClosedError                this client was closed
            RemoteError (forbidden)    the server rejects our key; also raised

        Raises `LocalError` (``busy``) for too many requests, `ProtocolError` if too large.
        """
        if self.closed:
            raise ClosedError("client is closed", endpoint=self.endpoint)
        if len(self._pending) >= self._max_pending:
            raise LocalError("too many requests are pending", code=ErrorCode.BUSY)
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # the same error object is raised many times
        request_id = self._last_id + 1
        frame = encode_request(message.op, request_id, self.boot, message, secret=self._secret)
        if len(frame) > self._max_bytes:
            raise too_large(len(frame), self._max_bytes)
        self._last_id = request_id
        ends_at = asyncio.get_running_loop().time() + timeout_s
        pending = _Pending(message, frame, on_reply, timeout_s, ends_at, on_sent)
        self._pending[request_id] = pending
        self._unsent[request_id] = None
        self._pump.flush()
        if ends_at < self._check_at:
            self._schedule_check(ends_at)
        return request_id

    def take_last(self) -> None:
        """Process what the server's process sent before its end."""
        self._pump.take_last()

    def take_back(self, request_id: int) -> None:
        """Drop a request and its reply. The server may still execute it."""
        self._pending.pop(request_id, None)
        self._unsent.pop(request_id, None)

    def _on_writable(self) -> None:
        while self._unsent:
            request_id = next(iter(self._unsent))
            pending = self._pending[request_id]
            if not self._pump.send(pending.frame):
                return
            del self._unsent[request_id]
            if pending.on_sent is not None:
                pending.on_sent()
                pending.on_sent = None

    # Requests that the old connection accepted may be lost with it. A request that the new one
    # accepted before this call is sent twice, which is harmless.
    def _on_made(self) -> None:
        if self._was_connected:
            self._unsent = dict.fromkeys(self._pending)
            self._on_writable()
            self._ping()
        self._was_connected = True

    def _ping(self) -> None:
        """Ping; receiving the reply is enough."""
        self._last_id += 1
        self._pump.send(
            encode_request(Ping.op, self._last_id, self.boot, Ping(), secret=self._secret)
        )

    def _keep_alive(self) -> None:
        now, silent_at = asyncio.get_running_loop().time(), self.received_at + self._ping_s
        if now >= silent_at:
            if self._silent_since != self.received_at:
                self._silent_since, self._num_unanswered = self.received_at, 0
            self._num_unanswered += now < self._ping_at + PAUSE_S
            silent_at = now + self._ping_s
            self._ping()
        self._ping_at = silent_at
        self._call_at(silent_at, self._keep_alive)

    # One timer serves all timeouts. Nearly every request is answered in time, so a timer for each
    # would be most of its cost.
    def _schedule_check(self, when: float) -> None:
        self._check_at = when
        self._call_at(when, self._time_out)

    def _time_out(self) -> None:
        now = asyncio.get_running_loop().time()
        self._was_paused = not self._was_paused and now >= self._check_at + PAUSE_S
        if self._was_paused:  # replies may have arrived meanwhile: let ZeroMQ read them first
            self._schedule_check(now + PAUSE_S)
            return
        self._check_at = math.inf
        late = [number for number, pending in self._pending.items() if pending.ends_at <= now]
        for request_id in late:
            if (pending := self._pending.get(request_id)) is not None:
                op = pending.message.op
                problem = f"no reply to '{op}' within {pending.timeout_s:g} s"
                self._settle(request_id, RequestTimeout(problem, op=op, endpoint=self.endpoint))
        following = min((one.ends_at for one in self._pending.values()), default=math.inf)
        if following < self._check_at:
            self._schedule_check(following)

    def _settle(self, request_id: int, outcome: Reply | KVBusError) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        self._unsent.pop(request_id, None)
        if isinstance(outcome, Reply):
            try:
                if outcome.error is not None:
                    outcome = refusal(outcome.error)
                else:
                    outcome = from_body(pending.message.reply, outcome.ok or {})
            except ProtocolError as wrong:
                outcome = wrong
        try:
            pending.on_reply(outcome)
        except Exception as error:  # a user's callback must not fail other requests
            self._on_fault(error)

    def _on_error(self, error: KVBusError) -> None:
        self._fail_all(error)

    def _fail_all(self, error: KVBusError) -> None:
        for request_id in list(self._pending):
            self._settle(request_id, error)

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) > 1:
            return
        try:
            envelope = decode(frames[0])
        except ProtocolError:
            return
        if isinstance(envelope, RequestFrame) or not self._note_boot(envelope.boot):
            return
        if isinstance(envelope, Reply):
            self._settle(envelope.request_id, envelope)
        else:
            self._call_user(self._report_notice, envelope)

    def _on_boot(self, boot: str, before: str | None) -> None:
        if before is not None:
            self._fail_all(PeerLost("the peer restarted", endpoint=self.endpoint))
        self._call_user(self._report_boot, boot)

    def _on_moved(self) -> None:
        self._call_user(self._report_moved, self.address)

    def _on_gone(self) -> None:
        self._call_user(self._report_gone, self.peer_boot or "")

    def _call_user(self, callback: Callable[[_T], None] | None, argument: _T) -> None:
        try:
            if callback is not None:
                callback(argument)
        except Exception as error:  # a user's callback must not end the connection
            self._on_fault(error)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._start(loop)
        self._keep_alive()

    def _close(self) -> None:
        self._on_writable()  # the last requests of this loop turn may still wait
        error = self.closed_by or ClosedError("client was closed", endpoint=self.endpoint)
        self._fail_all(error)
        super()._close()


@asynccontextmanager
async def agent_client(
    endpoint: str, *, curve: ClientCurve | None = None
) -> AsyncIterator[RequestClient]:
    with new_context() as context:
        options = SocketOptions(curve=curve)
        client = RequestClient(context, endpoint, boot=new_boot_id(), options=options)
        running = asyncio.create_task(client.run())  # a task group would wrap errors
        try:
            yield client
        finally:
            running.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([running])


async def call_agent(
    endpoint: str, message: Request[R], *, timeout_s: float, curve: ClientCurve | None = None
) -> R:
    """Raise `RequestRefused`, `RequestTimeout`, `ConfigError`, or `RemoteError` (``forbidden``)."""
    async with agent_client(endpoint, curve=curve) as client:
        return await client.request(message, timeout_s=timeout_s)
