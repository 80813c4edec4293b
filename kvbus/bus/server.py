import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio

from kvbus.bus.actor import SocketActor
from kvbus.bus.admission import PendingCalls, ServerLimits, Sessions
from kvbus.bus.pump import Pump
from kvbus.bus.session import Call, Session
from kvbus.bus.sockets import (
    BusContext,
    SocketOptions,
    bound_endpoint,
    descriptor_of,
    has_hung_up,
    key_of,
    max_request_bytes,
    max_request_items,
    open_router,
)
from kvbus.bus.trust import is_of_same_user
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.protocol.engine import Ping
from kvbus.protocol.envelope import (
    Body,
    RequestFrame,
    decode,
    encode_refusal,
    encode_reply,
    too_large,
)
from kvbus.protocol.message import Empty, Message, Request, error_body, from_body

Handler = Callable[[Any, Call], None]


class Quota(NamedTuple):
    """At most this many calls, shared fairly; `Call.on_end` reports one that gives way."""

    handler: Handler
    most: int


Handlers = Mapping[type[Request[Any]], Handler | Quota]

# A DEALER that disconnects drops messages that it received but has not delivered (libzmq 4.3.5 with
# ZMQ_IMMEDIATE). A server that closed right after a reply would lose it.
_GRACE_S = 0.05
CLOSING = KVBusError("the server is closing", code=ErrorCode.CLOSED)
# No process reads the reply to a request of an ended connection. Small requests are still handled,
# as they may release something, such as the last `release` before a process exits.
_LARGE_BYTES = 8 * 1024


@dataclass(slots=True)
class ServerCounters:
    pings: int = 0
    repeats_absorbed: int = 0
    malformed: int = 0
    busy: int = 0
    dropped: int = 0


class RequestServer(SocketActor):
    """A ROUTER that calls one handler for each request.

    A repeat of a request in progress is absorbed; the reply goes to the latest connection. A later
    repeat is executed again, as requests are idempotent.

    A `KVBusError` from a handler refuses the request. Other exceptions are answered ``internal``
    and go to ``on_fault``; without one they end `run`.
    """

    def __init__(
        self,
        context: BusContext,
        endpoint: str,
        *,
        boot: str,
        on_fault: Callable[[Exception, Call], None] | None = None,
        on_refusal: Callable[[KVBusError, Call], None] | None = None,
        limits: ServerLimits | None = None,
        options: SocketOptions | None = None,
    ) -> None:
        super().__init__()
        self.boot = boot
        self.counters = ServerCounters()
        self._on_fault, self._on_refusal = on_fault, on_refusal
        self._gate: Callable[[Call], None] | None = None
        self._routes: dict[str, tuple[type[Request[Any]], Handler]] = {}
        self._closing = False
        self._max_bytes = max_request_bytes(endpoint)
        self._max_items = max_request_items(endpoint)
        options, limits = options or SocketOptions(), limits or ServerLimits()
        self._has_keys = options.curve is not None
        socket = open_router(context, endpoint, options)
        self.endpoint = bound_endpoint(socket)
        self._pump = Pump(
            socket,
            on_frames=self._on_frames,
            on_failure=self._fail,
            on_writable=self._send_out,
        )
        self._outbox: deque[tuple[bytes, Session | bytes]] = deque()
        self.sessions = Sessions(limits, server_boot=boot, post=self._post)
        self.pending = PendingCalls(limits)

    def knows(self, call: Call) -> bool:
        """Return whether the sender has a key, or runs here as our user or root.

        Valid only in the call's handler, before it returns.
        """
        if call.session.key or self.endpoint.startswith("ipc://"):
            return True
        fd = descriptor_of(self._pump.last) if self._pump.last is not None else None
        return fd is not None and is_of_same_user(fd)

    def on(self, handlers: Handlers, *, gate: Callable[[Call], None] | None = None) -> None:
        """Register handlers. ``gate`` refuses a call by raising, before its body is parsed."""
        self._gate = gate
        for kind, entry in handlers.items():
            if isinstance(entry, Quota):
                self.pending.share(kind.op, entry.most)
            handler = entry.handler if isinstance(entry, Quota) else entry
            self._routes[kind.op] = kind, handler

    def end_key(self, key: str) -> None:
        error = KVBusError("this key is not trusted any more", code=ErrorCode.FORBIDDEN)
        self.sessions.end([one for one in self.sessions if one.key == key], error)

    def leave(self, last: Message) -> None:
        """Accept no further requests. Send ``last`` to pinned sessions."""
        self._end_calls()
        for session in self.sessions:
            if session.pinned:
                session.notify(last.op, last)

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            if len(frames) != 2:
                raise ProtocolError(f"message has {len(frames) - 1} frames or more")
            if len(frames[1]) > self._max_bytes:
                raise too_large(len(frames[1]), self._max_bytes)
            if len(frames[1]) > _LARGE_BYTES and has_hung_up(self._pump.last):
                self.counters.dropped += 1
                return
            request = decode(frames[1], max_items=self._max_items)
            if not isinstance(request, RequestFrame):
                raise ProtocolError("only requests are answered here")
        except ProtocolError as error:
            self.counters.malformed += 1
            self._refuse(identity, error.request_id or 0, error)
            return
        key = key_of(self._pump.last) if self._has_keys else ""
        sender = key, request.boot, request.secret or (b"" if key else identity)
        try:
            session = self.sessions.enter(sender, identity)
        except KVBusError as error:
            self._refuse(identity, request.request_id, error)
            return
        if not session.moves_to(identity):
            return
        if request.op == Ping.op:
            self.counters.pings += 1
            self._post(encode_reply(request.request_id, self.boot, Empty()), identity)
        elif request.request_id in session.pending:
            self.counters.repeats_absorbed += 1
        else:
            self._begin(session, request)

    def _begin(self, session: Session, request: RequestFrame) -> None:
        if self._closing:
            self._refuse(session.identity, request.request_id, CLOSING)
            return
        call = Call(session, request.request_id, request.op, self._on_answer)
        kind, handler = self._routes.get(request.op, (None, None))
        try:
            waits = kind is not None and not kind.at_once
            self.counters.busy += self.pending.add(call, waits=waits)
        except KVBusError as error:
            self._refuse(session.identity, request.request_id, error)
            if self._on_refusal is not None:
                self._on_refusal(error, call)
            return
        try:
            if self._gate is not None:
                self._gate(call)
            if kind is None or handler is None:
                raise ProtocolError(f"no request '{call.op}' here", code=ErrorCode.UNKNOWN_OP)
            handler(self._read(kind, request.body), call)
        except Exception as error:  # one handler's fault must not end other peers' requests
            if isinstance(error, KVBusError) and not call.answered:
                call.refuse(error)
            else:
                self._fault(error, call)

    def _read(self, kind: type[Request[Any]], body: Body) -> Request[Any]:
        message = from_body(kind, body)
        meant_for = getattr(message, "agent_boot", self.boot)
        if meant_for != self.boot:
            raise LocalError(
                "the message is for an earlier process of this agent",
                code=ErrorCode.STALE,
                theirs=meant_for,
                ours=self.boot,
            )
        return message

    def _on_answer(self, call: Call, outcome: Message | KVBusError | None) -> None:
        self.pending.remove(call)
        if outcome is None:
            return
        fault = None
        try:
            if isinstance(outcome, KVBusError):
                frame = encode_refusal(call.request_id, self.boot, error_body(outcome))
            else:
                frame = encode_reply(call.request_id, self.boot, outcome)
        except Exception as encoding:  # msgpack has no documented list of its encoding errors
            fault = encoding
            code = fault.code if isinstance(fault, KVBusError) else ErrorCode.INTERNAL
            error = KVBusError(f"reply to '{call.op}' could not be encoded", code=code)
            frame = encode_refusal(call.request_id, self.boot, error_body(error))
        self._post(frame, call.session)
        if fault is not None:
            self._fault(fault, call)
        elif self._on_refusal is not None and isinstance(outcome, KVBusError):
            self._on_refusal(outcome, call)

    def _fault(self, error: Exception, call: Call) -> None:
        if not call.answered:
            call.refuse(KVBusError(f"request '{call.op}' failed: internal error"))
        if self._on_fault is None:
            self._fail(error)
        else:
            self._on_fault(error, call)

    def _refuse(self, identity: bytes, request_id: int, error: KVBusError) -> None:
        if error.code is ErrorCode.BUSY:
            self.counters.busy += 1
        self._post(encode_refusal(request_id, self.boot, error_body(error)), identity)

    def _post(self, frame: bytes, to: Session | bytes) -> None:
        """Drop the frame if the connection is gone."""
        self._outbox.append((frame, to))
        self._pump.flush()

    def _send_out(self) -> None:
        while self._outbox:
            frame, to = self._outbox.popleft()
            if self._pump.send(to if isinstance(to, bytes) else to.identity, frame):
                continue
            self.counters.dropped += 1
            if isinstance(to, Session) and self._pump.was_full:
                to.on_queue_full()

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pump.start(loop)

    async def _on_close(self) -> None:
        self._end_calls()
        if len(self.sessions):
            await anyio.sleep(_GRACE_S)

    def _end_calls(self) -> None:
        self._closing = True
        for session in self.sessions:
            session.end_calls(CLOSING)

    def _close(self) -> None:
        for session in self.sessions:
            session.close()
        self._pump.close()
