"""The peers of a request server: who asks, its calls in progress, the notices to it."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple, Protocol

from kvbus.bus.limits import ServerCounters, ServerLimits, require_size
from kvbus.bus.pump import Pump
from kvbus.errors import ErrorCode, KVBusError, ProtocolError
from kvbus.protocol.envelope import Body, RequestFrame, decode, encode_notice
from kvbus.protocol.message import Message
from kvbus.table import Party, Shares


class Sender(NamedTuple):
    """Who a request is from. Boot ids are heard by others: ``proof`` is what they cannot show.

        with a secret     it comes with any connection         proof: the secret
        without, keys     any connection of the same key       proof: empty
        without, no keys  this connection and no other         proof: its routing id

    So another one under a known boot id is another sender, with a session of its own.
    """

    key: str
    boot: str
    proof: str | bytes

    @property
    def name(self) -> str:
        """Stands for the sender in tables and logs, without its secret."""
        return blake2b(repr(tuple(self)).encode(), digest_size=16).hexdigest()


def sender_of(request: RequestFrame, *, key: str, identity: bytes) -> Sender:
    """The sender of a request that came by the connection ``identity``, of ``key`` or of none."""
    return Sender(key, request.boot, request.secret or (b"" if key else identity))


def read_request(frames: list[bytes], max_bytes: int) -> RequestFrame:
    """The request in the frames behind the routing id; raises `ProtocolError`."""
    if len(frames) != 1:
        raise ProtocolError(f"message has {len(frames)} frames or more")
    require_size(frames[0], max_bytes)
    envelope = decode(frames[0])
    if not isinstance(envelope, RequestFrame):
        raise ProtocolError("only requests are answered here")
    return envelope


_MAX_LEFT = 8


class ServerView(Protocol):
    """What sessions and calls need of their server."""

    boot: str
    counters: ServerCounters
    pump: Pump

    def answer(self, call: "Call", outcome: Message | KVBusError) -> None:
        """Send the one reply to ``call``."""
        ...

    def let_go(self, call: "Call") -> None:
        """Count ``call`` no longer among those in progress."""
        ...


class Call:
    """One request to be answered exactly once, now or later, from the event loop's thread.

    One that its server has ended (`end`) was answered; what its owner says then goes nowhere. An
    owner that wants to know of that sets ``on_end``.
    """

    __slots__ = ("_server", "answered", "on_end", "op", "request_id", "session", "was_ended")

    def __init__(self, server: ServerView, session: "Session", request_id: int, op: str) -> None:
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

    def end(self, error: KVBusError) -> None:
        """Refuse it while its owner may still be at it."""
        self.refuse(error)
        self.was_ended = True
        if self.on_end is not None:
            self.on_end()


class Session:
    """One sender, over all the connections that it makes.

    Set ``pinned`` to keep it while idle. ``on_unread`` is called when a notice or an answer to it
    finds no room: a peer that does not read has lost something, and must not go on.
    """

    def __init__(self, server: ServerView, sender: Sender, identity: bytes) -> None:
        self.sender = sender
        self.boot, self.name = sender.boot, sender.name
        self.party: Party = sender.key or identity
        """Who pays for what it asks for: the key, or the connection by which it came first."""
        self.identity = identity
        self.pinned = False
        self.closed = False
        self.on_unread: Callable[[], None] | None = None
        self.pending: dict[int, Call] = {}
        self._server = server
        self._last_seq = 0
        self._left: deque[bytes] = deque(maxlen=_MAX_LEFT)

    @property
    def idle(self) -> bool:
        """True when nothing is lost by forgetting that this peer was ever here."""
        return not self.pending and not self.pinned

    def notify(self, op: str, body: Message | Body) -> None:
        """Send a notice; none to a session that was forgotten."""
        if self.closed:
            return
        self._last_seq += 1
        frame = encode_notice(op, self._last_seq, self._server.boot, body)
        self._server.counters.notices += 1
        if not self._server.pump.send(self.identity, frame):
            self.note_unsent()

    def note_unsent(self) -> None:
        """The peer does not read what it was sent; or it is gone, which somebody else sees."""
        if self.on_unread is not None and self._server.pump.was_full and not self.closed:
            self.on_unread()

    def move(self, identity: bytes) -> None:
        """The peer has a new connection, by which it asks again for all that it waits for."""
        self._left.append(self.identity)
        self.identity = identity

    def has_left(self, identity: bytes) -> bool:
        """Whether the peer had this connection before its present one: what comes late is old."""
        return identity in self._left

    def end_calls(self, error: KVBusError) -> None:
        """Refuse all that it waits for."""
        for call in list(self.pending.values()):
            call.end(error)

    def close(self) -> None:
        """Nobody waits for the answers any more."""
        self.closed = True
        for call in list(self.pending.values()):
            call.answered = call.was_ended = True
            self._server.let_go(call)
            if call.on_end is not None:
                call.on_end()


class SessionTable:
    """The sessions of a server, the one heard last at the end."""

    def __init__(self, server: ServerView, limits: ServerLimits) -> None:
        self._server, self._limits = server, limits
        self._shares = Shares()
        self._sessions: OrderedDict[Sender, Session] = OrderedDict()
        self._of: dict[Party, OrderedDict[Sender, Session]] = {}
        self._ended_boots: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def enter(self, sender: Sender, identity: bytes) -> Session:
        """The sender's session, begun if it has none; ``identity`` is its latest connection.

        Raises `KVBusError` with code ``stale`` or ``busy``.
        """
        session = self._sessions.get(sender)
        if session is None:
            session = self._sessions[sender] = self._begin(sender, identity)
            return session
        self._sessions.move_to_end(sender)
        self._of[session.party].move_to_end(sender)
        if session.identity != identity and not session.has_left(identity):
            session.move(identity)
        return session

    def end_boot(self, boot: str) -> None:
        """End the sessions of a process that is gone: for good, later messages are ``stale``."""
        self._end([sender for sender in self._sessions if sender.boot == boot])
        self._ended_boots[boot] = None
        if len(self._ended_boots) > self._limits.max_forgotten:
            self._ended_boots.popitem(last=False)

    def end_key(self, key: str) -> None:
        """End the sessions of a CURVE key."""
        self._end([sender for sender in self._sessions if sender.key == key])

    def has_ended(self, boot: str) -> bool:
        """Whether the process with that boot id is gone."""
        return boot in self._ended_boots

    def _end(self, senders: list[Sender]) -> None:
        for sender in senders:
            session = self._sessions.pop(sender)
            self._shares.add(session.party, -1)
            del self._of[session.party][sender]
            if not self._of[session.party]:
                del self._of[session.party]
            session.close()

    def _begin(self, sender: Sender, identity: bytes) -> Session:
        if sender.boot in self._ended_boots:
            raise KVBusError("this boot id was ended here", code=ErrorCode.STALE)
        session = Session(self._server, sender, identity)
        if len(self._sessions) >= self._limits.max_sessions:
            self._evict_for(session.party)
        self._shares.add(session.party, 1)
        self._of.setdefault(session.party, OrderedDict())[sender] = session
        return session

    def _evict_for(self, party: Party) -> None:
        """End a session of who has most, what it waits for too; among equals an idle one.

        So who fills the table has its own sessions ended, and not those that others work with.
        """
        largest = self._shares.gives_way_to(party)
        if largest is not None:
            may_go = (one for one in self._of[largest].values() if not one.pinned)
        else:
            may_go = (one for one in self._of.get(party, self._sessions).values() if one.idle)
        lost = next(may_go, None)
        busy = KVBusError("too many sessions", code=ErrorCode.BUSY)
        if lost is None:
            raise busy
        lost.end_calls(busy)
        self._end([lost.sender])
        self._server.counters.sessions_evicted += 1
