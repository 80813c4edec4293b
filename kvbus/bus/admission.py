"""The sessions of all senders of one server.

Refuses senders too many while none can go, and boots that were ended here.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from kvbus.bus.limits import ServerLimits
from kvbus.bus.sender import Sender
from kvbus.bus.session import ServerView, Session
from kvbus.errors import ErrorCode, KVBusError
from kvbus.table import Party, Shares


class SessionTable:
    """The sessions of a server, the one heard last at the end; ``on_end`` is told whose ended."""

    def __init__(
        self, server: ServerView, limits: ServerLimits, on_end: Callable[[Sender], None]
    ) -> None:
        self._server, self._limits, self._on_end = server, limits, on_end
        self._shares = Shares()
        self._sessions: OrderedDict[Sender, Session] = OrderedDict()
        self._of: dict[Party, OrderedDict[Sender, Session]] = {}
        self._ended_boots: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, sender: Sender) -> Session | None:
        """The sender's session, if there is one."""
        return self._sessions.get(sender)

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
        if session.identity != identity:
            session.moved(identity)
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
            self._on_end(sender)

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
            may_go = (one for one in self._of[largest].values() if not one.must_stay)
        else:
            may_go = (one for one in self._of.get(party, self._sessions).values() if one.idle)
        lost = next(may_go, None)
        busy = KVBusError("too many sessions", code=ErrorCode.BUSY)
        if lost is None:
            raise busy
        lost.end_calls(busy)
        self._end([lost.sender])
        self._server.counters.sessions_evicted += 1
