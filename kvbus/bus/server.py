"""The answering end of requests: a ROUTER, its sessions, and one answer to every request.

What it cannot read, has no room for, comes from a boot that was forgotten or is for an earlier
process gets an error reply. It answers ``ping`` itself.
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
from kvbus.table import Party, Places

Handler = Callable[[Any, "Call"], None]


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
_MAX_LEFT = 8
# Nobody reads the answer to a request of a connection that has ended. A small one is handled all
# the same, as it may give something back, such as the last `release` before a process exits.
_LARGE_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds of a `RequestServer`."""

    max_sessions: int = 1024
    max_pending: int = 8192
    max_session_pending: int = 1024
    max_forgotten: int = 4096


@dataclass(slots=True)
class ServerCounters:
    """What a `RequestServer` saw since it was made."""

    pings: int = 0
    repeats_absorbed: int = 0
    malformed: int = 0
    busy: int = 0
    dropped: int = 0


# Who a request is from: key, boot id, proof. Boot ids are heard by others; the proof is what they
# cannot show, so that another one under a known boot id is another sender, with its own session:
#
#     with a secret     it comes with any connection         proof: the secret
#     without, keys     any connection of the same key       proof: empty
#     without, no keys  this connection and no other         proof: its routing id
Sender = tuple[str, str, str | bytes]


class Call:
    """One request to be answered exactly once, now or later, from the event loop's thread.

    One that its server has ended (`end`) was answered; what its owner says then goes nowhere. An
    owner that wants to know of that sets ``on_end``.
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
        """Answer ``ok``; a message that cannot be encoded becomes an error reply and a fault."""
        self._server.answer(self, message)

    def refuse(self, error: KVBusError) -> None:
        """Answer with the code, message and detail of ``error``."""
        self._server.answer(self, error)

    def end(self, error: KVBusError | None) -> None:
        """Refuse it, or answer no more without ``error``, while its owner may still be at it."""
        if error is not None:
            self.refuse(error)
        else:
            self.answered = True
            self._server.let_go(self)
        self.was_ended = True
        if self.on_end is not None:
            self.on_end()


class Session:
    """One sender, over all the connections that it makes.

    Set ``pinned`` to keep it while idle. ``on_unread`` is called when a notice or an answer to it
    finds no room: a peer that does not read has lost something, and must not go on.
    """

    def __init__(self, server: "RequestServer", sender: Sender, identity: bytes) -> None:
        self.sender = sender
        self.key, self.boot, _ = sender
        self.name = blake2b(repr(sender).encode(), digest_size=16).hexdigest()
        """Stands for the sender in tables and logs, without its secret."""
        self.party: Party = self.key or identity
        """Who pays for what it asks for: the key, or the connection by which it came first."""
        self.identity = identity
        self.pinned = self.closed = False
        self.on_unread: Callable[[], None] | None = None
        self.pending: dict[int, Call] = {}
        self._server, self._last_seq = server, 0
        self._left: deque[bytes] = deque(maxlen=_MAX_LEFT)

    def notify(self, op: str, body: Message | Body) -> None:
        """Send a notice; none to a session that was forgotten."""
        if self.closed:
            return
        self._last_seq += 1
        self._server.post(encode_notice(op, self._last_seq, self._server.boot, body), self)

    def say_unread(self) -> None:
        """Its peer does not read."""
        if self.on_unread is not None and not self.closed:
            self.on_unread()

    def moves_to(self, identity: bytes) -> bool:
        """Whether this other connection is a new one: what comes by one that was left is not done.

        By a new one the peer asks again for all that it waits for.
        """
        if identity in self._left:
            return False
        self._left.append(self.identity)
        self.identity = identity
        return True

    def end_calls(self, error: KVBusError | None) -> None:
        """Refuse all that it waits for; without ``error`` nobody waits for it any more."""
        for call in list(self.pending.values()):
            call.end(error)

    def close(self, error: KVBusError | None = None) -> None:
        """It is forgotten, and so is what it waits for, or refused with ``error``."""
        self.closed = True
        self.end_calls(error)


class Sessions:
    """The sessions of a server, the one heard last at the end."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._sessions: OrderedDict[Sender, Session] = OrderedDict()
        self._ended_boots: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def find(self, sender: Sender) -> Session | None:
        """The sender's session, if it has one; it is heard now."""
        session = self._sessions.get(sender)
        if session is not None:
            self._sessions.move_to_end(sender)
        return session

    def add(self, session: Session) -> None:
        """Begin a session; raises `KVBusError` with code ``stale`` or ``busy``."""
        if session.boot in self._ended_boots:
            raise KVBusError("this boot id was ended here", code=ErrorCode.STALE)
        if len(self) >= self._limits.max_sessions:
            self._make_room(session.party)
        self._sessions[session.sender] = session

    def end_boot(self, boot: str) -> None:
        """End the sessions of a process that is gone: for good, later messages are ``stale``."""
        self.end([session for session in self if session.boot == boot])
        self._ended_boots[boot] = None
        if len(self._ended_boots) > self._limits.max_forgotten:
            self._ended_boots.popitem(last=False)

    def has_ended(self, boot: str) -> bool:
        """Whether the process with that boot id is gone."""
        return boot in self._ended_boots

    def end(self, sessions: list[Session], error: KVBusError | None = None) -> None:
        """Forget sessions; what they wait for is refused with ``error``."""
        for session in sessions:
            if self._sessions.pop(session.sender, None) is not None:
                session.close(error)

    def _make_room(self, party: Party) -> None:
        """End a session of who has most, what it waits for too; among equals an idle one.

        So who fills the table has its own sessions ended, and not those that others work with.
        """
        sessions = self._sessions.values()
        num_of = Counter(one.party for one in sessions)
        (largest, most), num_own = num_of.most_common(1)[0], num_of[party]
        if most > num_own + 1:
            may_go = (one for one in sessions if one.party == largest and not one.pinned)
        else:
            own = (one for one in sessions if one.party == party or not num_own)
            may_go = (one for one in own if not (one.pending or one.pinned))
        lost, busy = next(may_go, None), KVBusError("too many sessions", code=ErrorCode.BUSY)
        if lost is None:
            raise busy
        self.end([lost], busy)


class RequestServer(SocketActor):
    """Calls the request's handler, see `on`, for each one, in the event loop's thread.

    A request is known by (sender, id) while it is in progress: its repeat is absorbed, and the
    answer goes where the sender was heard last. After that a repeat is done again: requests are the
    same when done twice. A `KVBusError` out of a handler refuses its request. Any other exception
    is answered ``internal``, then given to ``on_fault``; without one it ends `run`. ``on_refusal``
    is told of each refused call. ``gate`` may refuse a call before its body is read. With
    ``options.curve`` a session belongs to the key of its connection, too.
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
        self._places: dict[str, Places[Call]] = {}
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
        """Whether the sender shows a key, or is a process of the same user on this machine.

        Only a call's handler may ask, before it returns.
        """
        if call.session.key or self.endpoint.startswith("ipc://"):
            return True
        fd = descriptor_of(self.pump.last) if self.pump.last is not None else None
        return fd is not None and is_of_same_user(fd)

    def on(self, handlers: Handlers) -> None:
        """Have requests of these classes handled; their ops must differ."""
        for kind, handler in handlers.items():
            if isinstance(handler, Shared):
                self._places[kind.op] = Places(handler.most)
                handler = handler.handler  # noqa: PLW2901 - what is called is within
            self._routes[kind.op] = kind, handler

    def forget(self, boot: str) -> None:
        """End the session of a process that is gone: for good, later messages are ``stale``."""
        self.sessions.end_boot(boot)

    def end_key(self, key: str) -> None:
        """End the sessions of a key that is not trusted any more: what they wait for is refused."""
        error = KVBusError("this key is not trusted any more", code=ErrorCode.FORBIDDEN)
        self.sessions.end([one for one in self.sessions if one.key == key], error)

    def leave(self, last: Message) -> None:
        """Begin nothing from now on; ``last`` is the last that sessions which stay are told."""
        self._end_calls()
        for session in self.sessions:
            if session.pinned:
                session.notify(last.op, last)

    def answer(self, call: Call, outcome: Message | KVBusError) -> None:
        """The end of every call, whoever answers it and whenever; `Call` calls it."""
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
        except Exception as encoding:  # msgpack documents no closed set for what it cannot encode
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
        """It is not in progress any more; `Call` calls it, too."""
        if call.session.pending.pop(call.request_id, None) is not None:
            self.num_pending -= 1
            if (places := self._places.get(call.op)) is not None:
                places.leave(call)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pump.start(loop)

    async def _on_close(self) -> None:
        """Refuse what is pending, and stay until it was read: see `_GRACE_S`."""
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
        except Exception as error:  # the handler's fault must not end other peers' requests
            if isinstance(error, KVBusError) and not call.answered:
                call.refuse(error)
            else:
                self._fault(error, call)

    def _read(self, kind: type[Request[Any]], body: Body) -> Request[Any]:
        """The typed message; raises `KVBusError` if it is wrong, or for an earlier process."""
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

    # What waits must not keep out what works. Claims, renewals and takes are answered at once, so
    # they need no room. Of those that wait, each party has its share of the calls with one op.
    def _make_room(self, call: Call) -> None:
        """Raise `KVBusError` (``busy``) when there is no room for a call that may wait."""
        limits, num_pending = self.limits, len(call.session.pending)
        if self.num_pending >= limits.max_pending or num_pending >= limits.max_session_pending:
            raise KVBusError("too many requests in progress", code=ErrorCode.BUSY)
        places = self._places.get(call.op)
        lost = places.enter(call.session.party, call) if places is not None else None
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
        """Answer without a call."""
        if error.code is ErrorCode.BUSY:
            self.counters.busy += 1
        self.post(encode_refusal(request_id, self.boot, error_body(error)), identity)

    def post(self, frame: bytes, to: "Session | bytes") -> None:
        """Send to a session's latest connection, or to this one; it is dropped if that is gone."""
        self._outbox.append((frame, to))
        self.pump.flush()

    def _send_out(self) -> None:
        while self._outbox:
            frame, to = self._outbox.popleft()
            if self.pump.send(to if isinstance(to, bytes) else to.identity, frame):
                continue
            self.counters.dropped += 1
            if isinstance(to, Session) and self.pump.was_full:
                to.say_unread()
