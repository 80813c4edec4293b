"""Server side of requests: a ROUTER socket, its sessions, and one reply for each request.

Malformed, stale and excess requests get error replies.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import anyio

from kvbus.bus.actor import SocketActor
from kvbus.bus.pump import Pump
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
from kvbus.fair import Permits, Tenant
from kvbus.protocol.engine import Ping
from kvbus.protocol.envelope import (
    Body,
    RequestFrame,
    decode,
    encode_notice,
    encode_refusal,
    encode_reply,
    too_large,
)
from kvbus.protocol.message import Empty, Message, Request, error_body, from_body

Handler = Callable[[Any, "Call"], None]


class Quota(NamedTuple):
    """Handler with up to ``most`` calls in progress, shared fairly between tenants.

    The server may end a call to make room; `Call.on_end` reports it.
    """

    handler: Handler
    most: int


Handlers = Mapping[type[Request[Any]], Handler | Quota]

# A DEALER that disconnects drops messages that it received but has not delivered (libzmq 4.3.5 with
# ZMQ_IMMEDIATE). A server that closed right after a reply would lose it.
_GRACE_S = 0.05
CLOSING = KVBusError("the server is closing", code=ErrorCode.CLOSED)
_MAX_LEFT = 8
# No process reads the reply to a request of an ended connection. Small requests are still handled,
# as they may release something, such as the last `release` before a process exits.
_LARGE_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    max_sessions: int = 1024
    max_pending: int = 8192
    max_session_pending: int = 1024
    max_forgotten: int = 4096


@dataclass(slots=True)
class ServerCounters:
    pings: int = 0
    repeats_absorbed: int = 0
    malformed: int = 0
    busy: int = 0
    dropped: int = 0


# Identity of a request's sender: key, boot id, proof. Other processes can learn a boot id, but not
# the proof. A different proof with a known boot id is a different sender, with its own session:
#
#     with a secret     valid on any connection              proof: the secret
#     without, keys     any connection of the same key       proof: empty
#     without, no keys  this connection and no other         proof: its routing id
Sender = tuple[str, str, str | bytes]


class Call:
    """Request to be answered exactly once, now or later, from the loop's thread.

    Replies to a call that the server has ended (``on_end``) are ignored.
    """

    __slots__ = ("_server", "answered", "on_end", "op", "request_id", "session", "was_ended")

    def __init__(
        self, server: "RequestServer", session: "Session", request_id: int, op: str
    ) -> None:
        self._server, self.session = server, session
        self.request_id, self.op = request_id, op
        self.answered = self.was_ended = False
        self.on_end: Callable[[], None] | None = None

    def reply(self, message: Message) -> None:
        """Reply ``ok``, or an error if ``message`` cannot be encoded."""
        self._server.answer(self, message)

    def refuse(self, error: KVBusError) -> None:
        self._server.answer(self, error)

    def end(self, error: KVBusError | None) -> None:
        """Refuse the call, or drop it. Its owner may still be working on it."""
        if error is not None:
            self.refuse(error)
        else:
            self.answered = True
            self._server.let_go(self)
        self.was_ended = True
        if self.on_end is not None:
            self.on_end()


class Session:
    """State of one sender, across its connections.

    A ``pinned`` session is kept while idle. ``on_unread`` is called when a message is lost because
    the peer's queue is full; the peer must not continue then.
    """

    def __init__(self, server: "RequestServer", sender: Sender, identity: bytes) -> None:
        self.sender = sender
        self.key, self.boot, _ = sender
        self.name = blake2b(repr(sender).encode(), digest_size=16).hexdigest()
        """Digest of the sender, without its secret."""
        self.tenant: Tenant = self.key or identity
        """Unit of fair shares: the key, or without keys the first connection."""
        self.identity = identity
        self.pinned = self.closed = False
        self.on_unread: Callable[[], None] | None = None
        self.pending: dict[int, Call] = {}
        self._server, self._last_seq = server, 0
        self._left: deque[bytes] = deque(maxlen=_MAX_LEFT)

    def notify(self, op: str, body: Message | Body) -> None:
        if self.closed:
            return
        self._last_seq += 1
        self._server.post(encode_notice(op, self._last_seq, self._server.boot, body), self)

    def on_queue_full(self) -> None:
        if self.on_unread is not None and not self.closed:
            self.on_unread()

    def moves_to(self, identity: bytes) -> bool:
        """Switch to a new connection. Return False for one that the sender has left.

        Its late requests are dropped: the peer repeats them on the new connection.
        """
        if identity in self._left:
            return False
        self._left.append(self.identity)
        self.identity = identity
        return True

    def end_calls(self, error: KVBusError | None) -> None:
        for call in list(self.pending.values()):
            call.end(error)

    def close(self, error: KVBusError | None = None) -> None:
        self.closed = True
        self.end_calls(error)


class Sessions:
    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._sessions: OrderedDict[Sender, Session] = OrderedDict()
        self._ended_boots: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def find(self, sender: Sender) -> Session | None:
        session = self._sessions.get(sender)
        if session is not None:
            self._sessions.move_to_end(sender)
        return session

    def add(self, session: Session) -> None:
        """Raises `KVBusError` with code ``stale`` or ``busy``."""
        if session.boot in self._ended_boots:
            raise KVBusError("this boot id was ended here", code=ErrorCode.STALE)
        if len(self) >= self._limits.max_sessions:
            self._make_room(session.tenant)
        self._sessions[session.sender] = session

    def end_boot(self, boot: str) -> None:
        """End the sessions of a dead process. Its later messages are ``stale``."""
        self.end([session for session in self if session.boot == boot])
        self._ended_boots[boot] = None
        if len(self._ended_boots) > self._limits.max_forgotten:
            self._ended_boots.popitem(last=False)

    def has_ended(self, boot: str) -> bool:
        return boot in self._ended_boots

    def end(self, sessions: list[Session], error: KVBusError | None = None) -> None:
        for session in sessions:
            if self._sessions.pop(session.sender, None) is not None:
                session.close(error)

    def _make_room(self, tenant: Tenant) -> None:
        """End a session of the largest tenant, even a busy one; among equals, an idle one.

        A tenant that fills the table loses its own sessions, not those of others.
        """
        sessions = self._sessions.values()
        num_of = Counter(one.tenant for one in sessions)
        (largest, most), num_own = num_of.most_common(1)[0], num_of[tenant]
        if most > num_own + 1:
            may_go = (one for one in sessions if one.tenant == largest and not one.pinned)
        else:
            own = (one for one in sessions if one.tenant == tenant or not num_own)
            may_go = (one for one in own if not (one.pending or one.pinned))
        lost, busy = next(may_go, None), KVBusError("too many sessions", code=ErrorCode.BUSY)
        if lost is None:
            raise busy
        self.end([lost], busy)


class RequestServer(SocketActor):
    """Server that calls one handler for each request, in the loop's thread; see `on`.

    A repeat of a request in progress is absorbed; the reply goes to the latest connection. A later
    repeat is executed again, as requests are idempotent.

    A `KVBusError` from a handler refuses the request. Other exceptions are answered ``internal``
    and go to ``on_fault``; without one they end `run`. ``on_refusal`` gets each refused call.
    ``gate`` can refuse a call before its body is parsed.
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
        self.sessions = Sessions(self.limits)
        self.num_pending = 0
        self._gate, self._on_fault, self._on_refusal = gate, on_fault, on_refusal
        self._routes: dict[str, tuple[type[Request[Any]], Handler]] = {}
        self._places: dict[str, Permits[Call]] = {}
        self._closing = False
        self._max_bytes, self._max_items = (
            max_request_bytes(endpoint),
            max_request_items(endpoint),
        )
        options = options or SocketOptions()
        self._has_keys = options.curve is not None
        socket = open_router(context, endpoint, options)
        self.endpoint = bound_endpoint(socket)
        self._outbox: deque[tuple[bytes, Session | bytes]] = deque()
        self.pump = Pump(
            socket,
            on_frames=self._on_frames,
            on_failure=self._fail,
            on_writable=self._send_out,
        )

    def knows(self, call: Call) -> bool:
        """Return whether the sender has a key, or runs here as our user or root.

        Valid only in the call's handler, before it returns.
        """
        if call.session.key or self.endpoint.startswith("ipc://"):
            return True
        fd = descriptor_of(self.pump.last) if self.pump.last is not None else None
        return fd is not None and is_of_same_user(fd)

    def on(self, handlers: Handlers) -> None:
        for kind, handler in handlers.items():
            if isinstance(handler, Quota):
                self._places[kind.op] = Permits(handler.most)
                handler = handler.handler  # noqa: PLW2901 - the callable is inside
            self._routes[kind.op] = kind, handler

    def forget(self, boot: str) -> None:
        """End the sessions of a dead process. Its later messages are ``stale``."""
        self.sessions.end_boot(boot)

    def end_key(self, key: str) -> None:
        """Refuse the calls of a revoked key and end its sessions."""
        error = KVBusError("this key is not trusted any more", code=ErrorCode.FORBIDDEN)
        self.sessions.end([one for one in self.sessions if one.key == key], error)

    def leave(self, last: Message) -> None:
        """Accept no further requests. Send ``last`` to pinned sessions."""
        self._end_calls()
        for session in self.sessions:
            if session.pinned:
                session.notify(last.op, last)

    def answer(self, call: Call, outcome: Message | KVBusError) -> None:
        if call.was_ended:
            return
        if call.answered:
            raise LocalError(f"call '{call.op}' was answered before", request_id=call.request_id)
        call.answered = True
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
        self.let_go(call)
        self.post(frame, call.session)
        if fault is not None:
            self._fault(fault, call)
        elif self._on_refusal is not None and isinstance(outcome, KVBusError):
            self._on_refusal(outcome, call)

    def let_go(self, call: Call) -> None:
        """Remove a call from those in progress. `Call` uses this."""
        if call.session.pending.pop(call.request_id, None) is not None:
            self.num_pending -= 1
            if (places := self._places.get(call.op)) is not None:
                places.leave(call)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pump.start(loop)

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
        self.pump.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            if len(frames) != 2:
                raise ProtocolError(f"message has {len(frames) - 1} frames or more")
            if len(frames[1]) > self._max_bytes:
                raise too_large(len(frames[1]), self._max_bytes)
            if len(frames[1]) > _LARGE_BYTES and has_hung_up(self.pump.last):
                self.counters.dropped += 1
                return
            request = decode(frames[1], max_items=self._max_items)
            if not isinstance(request, RequestFrame):
                raise ProtocolError("only requests are answered here")
        except ProtocolError as error:
            self.counters.malformed += 1
            self._refuse(identity, error.request_id or 0, error)
            return
        key = key_of(self.pump.last) if self._has_keys else ""
        sender = key, request.boot, request.secret or (b"" if key else identity)
        session = self.sessions.find(sender)
        if session is None:
            session = Session(self, sender, identity)
            try:
                self.sessions.add(session)
            except KVBusError as error:
                self._refuse(identity, request.request_id, error)
                return
        if identity != session.identity and not session.moves_to(identity):
            return
        if request.op == Ping.op:
            self.counters.pings += 1
            self.post(encode_reply(request.request_id, self.boot, Empty()), identity)
        elif request.request_id in session.pending:
            self.counters.repeats_absorbed += 1
        else:
            self._begin(session, request)

    def _begin(self, session: Session, request: RequestFrame) -> None:
        if self._closing:
            self._refuse(session.identity, request.request_id, CLOSING)
            return
        call = Call(self, session, request.request_id, request.op)
        kind, handler = self._routes.get(request.op, (None, None))
        if kind is not None and not kind.at_once:
            try:
                self._make_room(call)
            except KVBusError as error:
                self._refuse(session.identity, request.request_id, error)
                if self._on_refusal is not None:
                    self._on_refusal(error, call)
                return
        session.pending[request.request_id] = call
        self.num_pending += 1
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
        """Return the message. Raises `KVBusError` if invalid or for an earlier process."""
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

    # Requests that wait must not block requests that work. Acquires, renewals and takes are
    # answered at once, so they need no room. Among waiting requests, each tenant has its share of
    # the calls with one op.
    def _make_room(self, call: Call) -> None:
        """Raise `KVBusError` (``busy``) without room for a call that may wait."""
        limits, num_pending = self.limits, len(call.session.pending)
        if self.num_pending >= limits.max_pending or num_pending >= limits.max_session_pending:
            raise KVBusError("too many requests in progress", code=ErrorCode.BUSY)
        places = self._places.get(call.op)
        lost = places.enter(call.session.tenant, call) if places is not None else None
        if lost is not None:
            self.counters.busy += 1
            lost.end(KVBusError("others ask who have fewer in progress", code=ErrorCode.BUSY))

    def _fault(self, error: Exception, call: Call) -> None:
        if not call.answered:
            call.refuse(KVBusError(f"request '{call.op}' failed inside"))
        if self._on_fault is None:
            self._fail(error)
        else:
            self._on_fault(error, call)

    def _refuse(self, identity: bytes, request_id: int, error: KVBusError) -> None:
        if error.code is ErrorCode.BUSY:
            self.counters.busy += 1
        self.post(encode_refusal(request_id, self.boot, error_body(error)), identity)

    def post(self, frame: bytes, to: "Session | bytes") -> None:
        """Send to a session's latest connection or a given one. Drop the frame if that is gone."""
        self._outbox.append((frame, to))
        self.pump.flush()

    def _send_out(self) -> None:
        while self._outbox:
            frame, to = self._outbox.popleft()
            if self.pump.send(to if isinstance(to, bytes) else to.identity, frame):
                continue
            self.counters.dropped += 1
            if isinstance(to, Session) and self.pump.was_full:
                to.on_queue_full()
