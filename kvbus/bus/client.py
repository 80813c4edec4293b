"""The asking end of requests: a DEALER, one answer to each request, and the notices that come.

A request is sent again when the connection is a new one, and never because its answer is late: what
a connection has taken arrives while it lives. When the peer comes back as a new process, what was
pending fails.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio

from kvbus.bus.actor import SocketActor
from kvbus.bus.boot import BootChange, BootWatch, first_request_id, new_boot_id, new_secret
from kvbus.bus.connection import Connection
from kvbus.bus.curve import ClientCurve
from kvbus.bus.limits import max_request_bytes, require_size
from kvbus.bus.pump import Pump
from kvbus.bus.sockets import BusContext, SocketOptions, new_context, open_dealer
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
from kvbus.protocol.envelope import Notice, Reply, RequestFrame, decode, encode_request
from kvbus.protocol.message import Message, R, Request, read_reply, refusal

_T = TypeVar("_T")
OnReply = Callable[[R | KVBusError], None]

_ALIVE_S = 5.0
"""More than two heartbeats: no ping is sent though one of them is late."""


def _ignore(_: Message | KVBusError) -> None: ...


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that waits for its answer."""

    message: Request[Any]
    frame: bytes
    on_reply: OnReply[Any]
    timeout_s: float
    on_sent: Callable[[], None] | None
    """Called when a connection takes it for the first time."""


class RequestClient(SocketActor):
    """Requests to one server. The boot id must be this client's alone at that server.

    ``on_boot`` is called with the server's boot id when it becomes known and whenever it changes,
    ``on_gone`` with it when its process is gone, see `Connection`, also before it is known, as an
    empty one; what is pending waits on.
    ``on_notice`` is called for each notice, in order. Exceptions out of any callback go to
    ``on_fault``; without one they end `run`.
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
        on_fault: Callable[[Exception], None] | None = None,
        max_pending: int = 1024,
        ping_s: float = 1.0,
        options: SocketOptions | None = None,
    ) -> None:
        super().__init__()
        self.endpoint, self.boot = endpoint, boot
        self._on_notice, self._on_boot, self._on_gone = on_notice, on_boot, on_gone
        self._on_fault = on_fault or self._fail
        self._max_pending, self._ping_s = max_pending, ping_s
        self._peer = BootWatch()
        self._pending: dict[int, _Pending] = {}
        self._own: set[int] = set()
        self._unsent: dict[int, None] = {}
        self._secret, self._last_id = new_secret(), first_request_id()
        self._heard_at, self._alive_until = math.inf, 0.0
        self._was_connected = False
        socket = open_dealer(context, endpoint, options := options or SocketOptions())
        self._connection = Connection(
            context,
            socket,
            endpoint,
            options=options,
            timers=self.timers,
            on_error=self._fail_all,
            on_failure=self._fail,
            on_gone=self._lose,
            on_made=self._send_again,
        )
        self._pump = Pump(
            socket,
            on_frames=self._on_frames,
            on_failure=self._fail,
            on_writable=self._flush,
        )

    @property
    def peer_boot(self) -> str | None:
        """The server's boot id, once it has answered."""
        return self._peer.current

    @property
    def is_gone(self) -> bool:
        """Whether the server's process was found to be gone, and did not come back since."""
        return self._connection.is_gone

    @property
    def is_gone_here(self) -> bool:
        """As `is_gone`, and it was on this machine, whose kernel says so: no network is between."""
        return self._connection.is_gone_here

    @property
    def missing(self) -> str:
        """What keeps a request from its answer, in words; empty while there is a connection."""
        return self._connection.missing

    @property
    def silent_s(self) -> float:
        """For how long nothing came from the server; it is asked for a sign once in a while."""
        return max(0.0, self.timers.now() - self._heard_at)

    def note_alive(self, boot: str) -> None:
        """A heartbeat of the server came another way: no ping is needed for a while.

        That of another process is asked for its name at once.
        """
        if self.closed:
            return
        if boot == self.peer_boot:
            self._heard_at = self.timers.now()
            self._alive_until = self._heard_at + _ALIVE_S
        elif self.peer_boot is not None and not self._own:
            self._ping()

    @property
    def num_pending(self) -> int:
        """How many requests of the user wait for their reply."""
        return len(self._pending) - len(self._own)

    async def ask(self, message: Request[R], *, timeout_s: float) -> R:
        """The reply; raises what `send` would hand to its callback or raise itself.

        When the caller is cancelled the request is dropped here; the server may still do it.
        """
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
            self._remove(request_id)

    def send(
        self,
        message: Request[R],
        *,
        timeout_s: float,
        on_reply: OnReply[R],
        on_sent: Callable[[], None] | None = None,
    ) -> int:
        """Send a request; ``on_reply`` gets the reply or one of the errors below, once.

        ``on_sent`` is called when a connection takes it for the first time, maybe at once: while it
        was not, the server cannot have it.

        `RequestRefused` for an error reply, `ProtocolError` for a reply that makes no sense,
        `RequestTimeout` after ``timeout_s``, never if that is `math.inf`, `PeerLost` when the
        server came back as a new process, `ClosedError` when this client was closed. Raises
        `LocalError` with code ``busy`` when too many are pending, and `ProtocolError` when the
        message is too large. A server that does not take our key is `RemoteError` with code
        ``forbidden``, either way. Returns the request id.
        """
        if self.num_pending >= self._max_pending:
            raise LocalError("too many requests are pending", code=ErrorCode.BUSY)
        if self._connection.refusal is not None:
            raise self._connection.refusal
        return self._send(message, timeout_s, on_reply, on_sent)

    def take_last(self) -> None:
        """Take the answers and notices that have come: the server has ended."""
        self._pump.take_last()

    def take_back(self, request_id: int) -> None:
        """Send a request no more, and drop its reply; the server may do it all the same."""
        self._remove(request_id)

    def _send(
        self,
        message: Request[R],
        timeout_s: float,
        on_reply: OnReply[R],
        on_sent: Callable[[], None] | None = None,
    ) -> int:
        if self.closed:
            raise ClosedError("client is closed", endpoint=self.endpoint)
        request_id = self._last_id + 1
        frame = encode_request(message.op, request_id, self.boot, message, secret=self._secret)
        require_size(frame, max_request_bytes(self.endpoint))
        self._last_id = request_id
        self._pending[request_id] = pending = _Pending(message, frame, on_reply, timeout_s, on_sent)
        if self._unsent or not self._hand_over(pending):
            self._unsent[request_id] = None
        if timeout_s < math.inf:
            self.timers.at(self.timers.now() + timeout_s, self._time_out, request_id)
        return request_id

    def _hand_over(self, pending: _Pending) -> bool:
        """Whether there is a connection that takes it."""
        is_sent = self._pump.send(pending.frame)
        if is_sent and pending.on_sent is not None:
            pending.on_sent()
            pending.on_sent = None
        return is_sent

    def _flush(self) -> None:
        """Send what found no connection, or no room on it, in the order of the requests."""
        for request_id in list(self._unsent):
            if not self._hand_over(self._pending[request_id]):
                return
            del self._unsent[request_id]

    # What the connection before has taken may be lost with it. What the new one took before its
    # making is told comes twice, which changes nothing.
    def _send_again(self) -> None:
        """There is a connection; send all that waits, unless it is the first."""
        if self._was_connected:
            self._unsent = dict.fromkeys(self._pending)
            self._flush()
        self._was_connected = True

    def _remove(self, request_id: int) -> _Pending | None:
        self._unsent.pop(request_id, None)
        return self._pending.pop(request_id, None)

    def _time_out(self, request_id: int) -> None:
        pending = self._pending.get(request_id)
        if pending is None:
            return
        op = pending.message.op
        problem = f"no reply to '{op}' within {pending.timeout_s:g} s"
        self._settle(request_id, RequestTimeout(problem, op=op, endpoint=self.endpoint))

    def _settle(self, request_id: int, outcome: Reply | KVBusError) -> None:
        pending = self._remove(request_id)
        if pending is None:
            return
        self._own.discard(request_id)
        try:
            pending.on_reply(_outcome_of(pending.message, outcome))
        except Exception as error:  # the user's callback must not end other requests
            self._on_fault(error)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pump.start(loop)
        self._connection.start(loop)
        self._heard_at = loop.time()
        self.timers.at(self._heard_at + self._ping_s, self._keep_alive)

    def _close(self) -> None:
        self._fail_all(ClosedError("client was closed", endpoint=self.endpoint))
        self._connection.close()
        self._pump.close()

    def _lose(self) -> None:
        self._call_user(self._on_gone, self._peer.current or "")

    def _fail_all(self, error: KVBusError) -> None:
        for request_id in list(self._pending):
            self._settle(request_id, error)

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            envelope = _read_answer(frames)
        except ProtocolError:
            return
        if envelope.boot != self._peer.current and not self._greet(envelope.boot):
            return
        self._heard_at = self.timers.now()
        if isinstance(envelope, Reply):
            self._settle(envelope.request_id, envelope)
        else:
            self._call_user(self._on_notice, envelope)

    def _greet(self, boot: str) -> bool:
        """The server has another boot id than it had; False when the message is an old one's."""
        sighting = self._peer.see(boot)
        if sighting is BootChange.RETIRED:
            return False
        if sighting is BootChange.CHANGED:
            self._fail_all(PeerLost("peer came back as a new process", endpoint=self.endpoint))
        self._call_user(self._on_boot, boot)
        return True

    def _call_user(self, callback: Callable[[_T], None] | None, argument: _T) -> None:
        try:
            if callback is not None:
                callback(argument)
        except Exception as error:  # the user's callback must not end the connection
            self._on_fault(error)

    def _keep_alive(self, _: int) -> None:
        """Ask a silent server for a sign: it may be a new one, or not know this connection."""
        now = self.timers.now()
        silent_until = max(self._heard_at + self._ping_s, self._alive_until)
        if now >= silent_until:
            silent_until = now + self._ping_s
            self._ping()
        self.timers.at(silent_until, self._keep_alive)

    def _ping(self) -> None:
        self._own.add(self._send(Ping(), self._ping_s, _ignore))


def _read_answer(frames: list[bytes]) -> Reply | Notice:
    envelope = decode(frames[0])
    if len(frames) != 1 or isinstance(envelope, RequestFrame):
        raise ProtocolError("a server sends replies and notices of one frame")
    return envelope


def _outcome_of(message: Request[R], reply: Reply | KVBusError) -> R | KVBusError:
    """The typed reply to ``message``, or the error that stands for it."""
    if isinstance(reply, KVBusError):
        return reply
    if reply.error is not None:
        return refusal(reply.error)
    try:
        return read_reply(message, reply.ok or {})
    except ProtocolError as error:
        return error


@asynccontextmanager
async def agent_client(
    endpoint: str, *, curve: ClientCurve | None = None
) -> AsyncIterator[RequestClient]:
    """Several requests to one agent; what they raise is to be caught in the block.

    Raises `ConfigError` for an endpoint or a key that is none.
    """
    with new_context() as context:
        options = SocketOptions(curve=curve)
        client = RequestClient(context, endpoint, boot=new_boot_id(), options=options)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            yield client
            tasks.cancel_scope.cancel()


async def ask_agent(
    endpoint: str, message: Request[R], *, timeout_s: float, curve: ClientCurve | None = None
) -> R:
    """The typed reply of the agent at ``endpoint``, which is asked with keys if it has some.

    Raises `RequestRefused`, `RequestTimeout`, `ConfigError` for an endpoint that is none, and
    `RemoteError` with code ``forbidden`` when the two have not the keys for each other.
    """
    outcome: R | KVBusError
    async with agent_client(endpoint, curve=curve) as client:
        try:
            outcome = await client.ask(message, timeout_s=timeout_s)
        except KVBusError as error:
            outcome = error
    if isinstance(outcome, KVBusError):
        raise outcome
    return outcome
