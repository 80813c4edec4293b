"""The answering end of requests: a ROUTER, its sessions, and one answer to every request.

What it cannot read, has no room for, comes from a boot that was forgotten or is for an earlier
process gets an error reply. It answers ``ping`` itself.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import anyio

from kvbus.bus.actor import SocketActor
from kvbus.bus.limits import ServerCounters, ServerLimits, max_request_bytes
from kvbus.bus.pump import Pump
from kvbus.bus.same_user import is_of_same_user
from kvbus.bus.session import Call, Session, SessionTable, read_request, sender_of
from kvbus.bus.sockets import (
    BusContext,
    SocketOptions,
    bound_endpoint,
    descriptor_of,
    key_of,
    open_router,
)
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.protocol.engine import Ping
from kvbus.protocol.envelope import Body, RequestFrame, encode_refusal, encode_reply
from kvbus.protocol.message import Empty, Message, Request, error_body, from_body
from kvbus.table import Places

Handler = Callable[[Any, Call], None]


class Shared(NamedTuple):
    """A handler with at most ``most`` calls in progress, in fair shares of the parties that ask.

    A call may be ended to make room for another party's: it sets `Call.on_end`.
    """

    handler: Handler
    most: int


Handlers = Mapping[type[Request[Any]], Handler | Shared]
"""By class of request: what is called with the message, and with the call to answer."""

# A DEALER that is disconnected drops what it has received but not yet handed out (libzmq 4.3.5,
# with ZMQ_IMMEDIATE): whoever closes right after a reply takes it back.
_GRACE_S = 0.05
CLOSING = KVBusError("the server is closing", code=ErrorCode.CLOSED)


class RequestServer(SocketActor):
    """Calls the request's handler, see `on`, for each one, in the event loop's thread.

    A request is known by (sender, id) while it is in progress: its repeat is absorbed, and the
    answer goes where the sender was heard last. After that a repeat is done again: requests are the
    same when done twice. A `KVBusError` out of a handler
    refuses its request. Any other exception is answered ``internal``, then given to ``on_fault``;
    without one it ends `run`. ``on_refusal`` is told of each refused call. ``gate`` may refuse a
    call before its body is read. With ``options.curve`` a session belongs to the key of its
    connection, too.
    """

    def __init__(
        self,
        context: BusContext,
        endpoint: str,
        *,
        boot: str,
        gate: Callable[[Call], None] | None = None,
        on_fault: Callable[[Exception, Call], None] | None = None,
        on_refusal: Callable[[KVBusError, Call], None] | None = None,
        limits: ServerLimits | None = None,
        options: SocketOptions | None = None,
    ) -> None:
        super().__init__()
        self.boot = boot
        self.limits, self.counters = limits or ServerLimits(), ServerCounters()
        self._gate, self._on_fault, self._on_refusal = gate, on_fault, on_refusal
        self._routes: dict[str, tuple[type[Request[Any]], Handler]] = {}
        self._places: dict[str, Places[Call]] = {}
        self.sessions = SessionTable(self, self.limits)
        self.num_pending = 0
        self._closing = False
        options = options or SocketOptions()
        self._has_keys = options.curve is not None
        self._max_frame_bytes = max_request_bytes(endpoint)
        socket = open_router(context, endpoint, options, max_frame_bytes=self._max_frame_bytes)
        self.endpoint = bound_endpoint(socket)
        self.pump = Pump(socket, on_frames=self._on_frames, on_failure=self._fail)

    def knows(self, call: Call) -> bool:
        """Whether the sender shows a key, or is a process of the same user on this machine.

        Only a call's handler may ask, before it returns.
        """
        if call.session.sender.key or self.endpoint.startswith("ipc://"):
            return True
        fd = descriptor_of(self.pump.last) if self.pump.last is not None else None
        return fd is not None and is_of_same_user(fd)

    def on(self, handlers: Handlers) -> None:
        """Have requests of these classes handled; their ops must differ."""
        for kind, handler in handlers.items():
            if isinstance(handler, Shared):
                self._places[kind.op] = Places(handler.most)
                self._routes[kind.op] = kind, handler.handler
            else:
                self._routes[kind.op] = kind, handler

    def forget(self, boot: str) -> None:
        """End the session of a process that is gone: for good, later messages are ``stale``."""
        self.sessions.end_boot(boot)

    def end_key(self, key: str) -> None:
        """End the sessions of a key that is not trusted any more: what they wait for is refused."""
        error = KVBusError("this key is not trusted any more", code=ErrorCode.FORBIDDEN)
        for session in self.sessions:
            if session.sender.key == key:
                session.end_calls(error)
        self.sessions.end_key(key)

    def leave(self, last: Message) -> None:
        """Begin nothing from now on; ``last`` is the last that sessions which stay are told."""
        self._closing = True
        for session in self.sessions:
            session.end_calls(CLOSING)
            if session.pinned:
                session.notify(last.op, last)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pump.start(loop)

    async def _on_close(self) -> None:
        """Refuse what is pending, and stay until it was read: see `_GRACE_S`."""
        self._closing = True
        for session in self.sessions:
            session.end_calls(CLOSING)
        if len(self.sessions):
            await anyio.sleep(_GRACE_S)

    def _close(self) -> None:
        for session in self.sessions:
            session.close()
        self.pump.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        identity, key = frames[0], key_of(self.pump.last) if self._has_keys else ""
        try:
            request = read_request(frames[1:], self._max_frame_bytes)
        except ProtocolError as error:
            self.counters.malformed += 1
            self._refuse(identity, error.request_id or 0, error)
            return
        self._on_request(identity, request, key=key)

    def _refuse(self, identity: bytes, request_id: int, error: KVBusError) -> None:
        """Answer without a call."""
        self._post(identity, encode_refusal(request_id, self.boot, error_body(error)))

    def _post(self, identity: bytes, frame: bytes) -> bool:
        is_sent = self.pump.send(identity, frame)
        if is_sent:
            self.counters.replies += 1
        else:
            self.counters.replies_dropped += 1
        return is_sent

    def _on_request(self, identity: bytes, request: RequestFrame, *, key: str) -> None:
        sender = sender_of(request, key=key, identity=identity)
        try:
            session = self.sessions.enter(sender, identity)
        except KVBusError as error:
            self._turn_away(identity, request, error)
            return
        if session.has_left(identity):
            return
        if request.op == Ping.op:
            self.counters.pings += 1
            self._post(identity, encode_reply(request.request_id, self.boot, Empty()))
        elif request.request_id in session.pending:
            self.counters.repeats_absorbed += 1
        else:
            self._begin(session, request)

    def _turn_away(self, identity: bytes, request: RequestFrame, error: KVBusError) -> None:
        if error.code is ErrorCode.BUSY:
            self.counters.busy += 1
        else:
            self.counters.stale += 1
        self._refuse(identity, request.request_id, error)

    def _begin(self, session: Session, request: RequestFrame) -> None:
        if self._closing:
            self._refuse(session.identity, request.request_id, CLOSING)
            return
        call = Call(self, session, request.request_id, request.op)
        try:
            self._make_room(call)
        except KVBusError as error:
            self.counters.busy += 1
            self._refuse(session.identity, request.request_id, error)
            if self._on_refusal is not None:
                self._on_refusal(error, call)
            return
        session.pending[request.request_id] = call
        self.num_pending += 1
        self.counters.requests += 1
        try:
            self._handle(call, request.body)
        except Exception as error:  # the handler's fault must not end other peers' requests
            if isinstance(error, KVBusError) and not call.answered:
                call.refuse(error)
            else:
                self._fault(error, call)

    # What waits must not keep out what works. Claims, renewals and takes are answered at once, so
    # they need no room. Of those that wait, each party has its share of the calls with one op.
    def _make_room(self, call: Call) -> None:
        """Raise `KVBusError` (``busy``) when there is no room for a call that may wait."""
        route, limits = self._routes.get(call.op), self.limits
        if route is None or route[0].at_once:
            return
        num_pending = len(call.session.pending)
        if self.num_pending >= limits.max_pending or num_pending >= limits.max_session_pending:
            raise KVBusError("too many requests in progress", code=ErrorCode.BUSY)
        places = self._places.get(call.op)
        lost = places.enter(call.session.party, call) if places is not None else None
        if lost is not None:
            self.counters.busy += 1
            lost.end(KVBusError("others ask who have fewer in progress", code=ErrorCode.BUSY))

    def _handle(self, call: Call, body: Body) -> None:
        """Give the typed message to its handler, if it is meant for this process."""
        if self._gate is not None:
            self._gate(call)
        route = self._routes.get(call.op)
        if route is None:
            raise ProtocolError(f"no request '{call.op}' here", code=ErrorCode.UNKNOWN_OP)
        kind, handler = route
        message = from_body(kind, body)
        meant_for = getattr(message, "agent_boot", self.boot)
        if meant_for != self.boot:
            raise LocalError(
                "the message is for an earlier process of this agent",
                code=ErrorCode.STALE,
                theirs=meant_for,
                ours=self.boot,
            )
        handler(message, call)

    def _fault(self, error: Exception, call: Call) -> None:
        self.counters.faults += 1
        if not call.answered:
            call.refuse(KVBusError(f"request '{call.op}' failed inside"))
        if self._on_fault is None:
            self._fail(error)
        else:
            self._on_fault(error, call)

    def answer(self, call: Call, outcome: Message | KVBusError) -> None:
        """The end of every call, whoever answers it and whenever; `Call` calls it."""
        if call.was_ended:
            return
        if call.answered:
            raise LocalError(f"call '{call.op}' was answered before", request_id=call.request_id)
        call.answered = True
        session, fault = call.session, None
        try:
            if isinstance(outcome, KVBusError):
                frame = encode_refusal(call.request_id, self.boot, error_body(outcome))
            else:
                frame = encode_reply(call.request_id, self.boot, outcome)
        except Exception as encoding:  # msgpack documents no closed set for what it cannot encode
            fault = encoding
            frame = self._unencodable(call, encoding)
        self.let_go(call)
        if not self._post(session.identity, frame):
            session.note_unsent()
        if fault is not None:
            self._fault(fault, call)
        elif self._on_refusal is not None and isinstance(outcome, KVBusError):
            self._on_refusal(outcome, call)

    def let_go(self, call: Call) -> None:
        """It is not in progress any more; `Session` calls it, too."""
        if call.session.pending.pop(call.request_id, None) is not None:
            self.num_pending -= 1
            if (places := self._places.get(call.op)) is not None:
                places.leave(call)

    def _unencodable(self, call: Call, fault: Exception) -> bytes:
        code = fault.code if isinstance(fault, KVBusError) else ErrorCode.INTERNAL
        error = KVBusError(f"reply to '{call.op}' could not be encoded", code=code)
        return encode_refusal(call.request_id, self.boot, error_body(error))
