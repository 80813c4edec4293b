"""The answering end of requests: a ROUTER, its sessions, and one reply for every request.

Refuses what it cannot read, what it has no room for, and boots that were forgotten; each with an
error reply. Knows no operation but its own two: ``ack`` for notices and ``ping``.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import anyio

from kvbus.bus.limits import ServerCounters, ServerLimits
from kvbus.bus.pump import Pump
from kvbus.bus.replies import ReplyCache
from kvbus.bus.session import Call, Session
from kvbus.bus.socket_actor import SocketActor
from kvbus.bus.sockets import BusContext, SocketOptions, bound_endpoint, open_router
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.protocol.envelope import Body, Reply, Request, decode, encode_reply
from kvbus.protocol.message import error_body

OnFault = Callable[[Exception, Call], None]

_UNREADABLE_ID = 0
# A DEALER that is disconnected drops what it has received but not yet handed out (libzmq 4.3.5,
# with ZMQ_IMMEDIATE): whoever closes right after a reply takes it back.
_GRACE_S = 0.05


class RequestServer(SocketActor):
    """Calls ``handler`` once for each new request, in the event loop's thread.

    A request is known by (boot, id): a repeat gets the kept reply, or is absorbed while the first
    is in progress. Ids of one boot must rise: one that is older than every kept reply and not
    known any more is ``stale``. Without ``on_fault``, an exception out of ``handler`` is still
    answered ``internal`` and then ends `run`.
    """

    def __init__(
        self,
        context: BusContext,
        endpoint: str,
        *,
        boot: str,
        handler: Callable[[Call], None],
        on_fault: OnFault | None = None,
        limits: ServerLimits | None = None,
        options: SocketOptions | None = None,
        resend_s: float = 0.25,
    ) -> None:
        super().__init__()
        self.boot, self.resend_s = boot, resend_s
        self.limits, self.counters = limits or ServerLimits(), ServerCounters()
        self._handler, self._on_fault = handler, on_fault
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._replies = ReplyCache(
            max_replies=self.limits.max_replies, max_bytes=self.limits.max_reply_bytes
        )
        self._num_pending = 0
        self._closing = False
        socket = open_router(context, endpoint, options or SocketOptions())
        self.endpoint = bound_endpoint(socket)
        self._pump = Pump(socket, on_frames=self._on_frames, on_failure=self._fail)

    @property
    def num_pending(self) -> int:
        """How many calls wait for their answer."""
        return self._num_pending

    @property
    def num_sessions(self) -> int:
        """How many sessions are known."""
        return len(self._sessions)

    @property
    def num_unacknowledged(self) -> int:
        """How many notices were not acknowledged yet, of all sessions."""
        return sum(session.num_unacknowledged for session in self._sessions.values())

    def session(self, boot: str) -> Session | None:
        """The session of the peer with that boot id."""
        return self._sessions.get(boot)

    def forget(self, boot: str) -> None:
        """End the session of a process that is gone: for good, later messages are ``stale``."""
        session = self._sessions.pop(boot, None)
        if session is not None:
            session.close()
        self._forgotten[boot] = None
        if len(self._forgotten) > self.limits.max_forgotten:
            self._forgotten.popitem(last=False)

    def post(self, identity: bytes, frame: bytes) -> bool:
        """Send to a connection; False when it is gone or does not take more."""
        return self._pump.send(identity, frame)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pump.start(loop)

    async def _on_close(self) -> None:
        """Refuse what is pending, and stay until it was read: see `_GRACE_S`."""
        self._closing = True
        for session in self._sessions.values():
            for call in list(session.pending.values()):
                call.refuse(_closing_error())
        if self._sessions:
            await anyio.sleep(_GRACE_S)

    def _close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._pump.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            request = _read(frames)
        except ProtocolError as error:
            self.counters.malformed += 1
            self._refuse(identity, error.request_id or _UNREADABLE_ID, error)
            return
        self._on_request(identity, request)

    def _refuse(self, identity: bytes, request_id: int, error: KVBusError) -> bytes:
        """Answer without a call; returns the frame."""
        frame = encode_reply(Reply(request_id, self.boot, error=error_body(error)))
        self._post_reply(identity, frame)
        return frame

    def _post_reply(self, identity: bytes, frame: bytes) -> None:
        if self.post(identity, frame):
            self.counters.replies += 1
        else:
            self.counters.replies_dropped += 1

    def _on_request(self, identity: bytes, request: Request) -> None:
        session = self._sessions.get(request.boot)
        if session is None:
            session = self._admit(identity, request)
            if session is None:
                return
        else:
            self._sessions.move_to_end(request.boot)
        if session.identity != identity:
            session.moved(identity)
        if request.op == "ack":
            self._on_ack(session, request)
        elif request.op == "ping":
            self._answer_frame(session, Reply(request.request_id, self.boot))
        elif not self._known(session, request):
            self._begin(session, request)

    def _admit(self, identity: bytes, request: Request) -> Session | None:
        if request.boot in self._forgotten:
            self.counters.stale += 1
            error = KVBusError("this boot id was ended here", code=ErrorCode.STALE)
            self._refuse(identity, request.request_id, error)
            return None
        if len(self._sessions) >= self.limits.max_sessions and not self._evict():
            self.counters.busy += 1
            error = KVBusError("too many sessions", code=ErrorCode.BUSY)
            self._refuse(identity, request.request_id, error)
            return None
        session = self._sessions[request.boot] = Session(self, request.boot, identity)
        return session

    def _evict(self) -> bool:
        idle = next((s for s in self._sessions.values() if s.idle), None)
        if idle is None:
            return False
        del self._sessions[idle.boot]
        idle.close()
        self.counters.sessions_evicted += 1
        return True

    def _on_ack(self, session: Session, request: Request) -> None:
        try:
            session.acknowledge(_acknowledged(request.body, self.boot))
        except LocalError as error:
            self._refuse(session.identity, request.request_id, error)
            return
        self._answer_frame(session, Reply(request.request_id, self.boot))

    def _answer_frame(self, session: Session, reply: Reply) -> None:
        self._post_reply(session.identity, encode_reply(reply))

    def _known(self, session: Session, request: Request) -> bool:
        """Deal with a repeat; False when the request is a new one."""
        request_id = request.request_id
        if request_id in session.pending:
            self.counters.repeats_absorbed += 1
            return True
        kept = self._replies.get((session.boot, request_id))
        if kept is not None:
            self.counters.repeats_answered += 1
            self._post_reply(session.identity, kept)
            return True
        if request_id <= session.evicted_upto:
            self.counters.stale += 1
            error = KVBusError("request is older than the kept replies", code=ErrorCode.STALE)
            self._refuse(session.identity, request_id, error)
            return True
        return False

    def _begin(self, session: Session, request: Request) -> None:
        limits = self.limits
        if self._closing:
            self._refuse(session.identity, request.request_id, _closing_error())
            return
        if (
            self._num_pending >= limits.max_pending
            or len(session.pending) >= limits.max_session_pending
        ):
            self.counters.busy += 1
            error = KVBusError("too many requests in progress", code=ErrorCode.BUSY)
            frame = self._refuse(session.identity, request.request_id, error)
            self._keep(session, request.request_id, frame)
            return
        call = Call(session, request.request_id, request.op, request.body, self._answer)
        session.pending[request.request_id] = call
        self._num_pending += 1
        self.counters.requests += 1
        try:
            self._handler(call)
        except Exception as error:  # the handler's fault must not end other peers' requests
            self._fault(error, call)

    def _fault(self, error: Exception, call: Call) -> None:
        self.counters.faults += 1
        if not call.answered:
            call.refuse(KVBusError(f"request '{call.op}' failed inside"))
        if self._on_fault is None:
            self._fail(error)
        else:
            self._on_fault(error, call)

    def _answer(self, call: Call, ok: Body | None, error: Body | None) -> None:
        """The end of every call, whoever answers it and whenever."""
        session, fault = call.session, None
        try:
            frame = encode_reply(Reply(call.request_id, self.boot, ok, error))
        except Exception as encoding:  # msgpack documents no closed set for what it cannot encode
            fault = encoding
            frame = self._unencodable(call, encoding)
        if session.pending.pop(call.request_id, None) is not None:
            self._num_pending -= 1
        if not session.closed:
            self._keep(session, call.request_id, frame)
        self._post_reply(session.identity, frame)
        if fault is not None:
            self._fault(fault, call)

    def _unencodable(self, call: Call, fault: Exception) -> bytes:
        code = fault.code if isinstance(fault, KVBusError) else ErrorCode.INTERNAL
        error = KVBusError(f"reply to '{call.op}' could not be encoded", code=code)
        return encode_reply(Reply(call.request_id, self.boot, error=error_body(error)))

    def _keep(self, session: Session, request_id: int, frame: bytes) -> None:
        for boot, evicted_id in self._replies.put((session.boot, request_id), frame):
            owner = self._sessions.get(boot)
            if owner is not None:
                owner.evicted_upto = max(owner.evicted_upto, evicted_id)


def _closing_error() -> KVBusError:
    return KVBusError("the server is closing", code=ErrorCode.CLOSED)


def _read(frames: list[bytes]) -> Request:
    if len(frames) != 2:
        raise ProtocolError(f"message has {len(frames) - 1} frames")
    envelope = decode(frames[1])
    if not isinstance(envelope, Request):
        raise ProtocolError("only requests are answered here")
    return envelope


def _acknowledged(body: Body, boot: str) -> int:
    """The seq in an ``ack``; the boot is in it since a restarted server numbers from 1 again."""
    upto = body.get("upto")
    if type(upto) is not int or upto < 0:
        raise LocalError("field 'upto' must be an unsigned integer", field="upto")
    if body.get("boot") != boot:
        raise LocalError("acknowledges another boot's notices", code=ErrorCode.STALE)
    return upto
