"""Admission of sessions and waiting calls.

A tenant that fills a table loses its own sessions or calls.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from kvbus.bus.session import Call, Post, Sender, Session
from kvbus.errors import ErrorCode, KVBusError
from kvbus.fair import Permits, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    max_sessions: int = 1024
    max_pending: int = 8192
    max_session_pending: int = 1024
    max_forgotten: int = 4096


class Sessions:
    def __init__(self, limits: ServerLimits, *, server_boot: str, post: Post) -> None:
        self._limits = limits
        self._new_session = partial(Session, server_boot=server_boot, post=post)
        self._sessions: OrderedDict[Sender, Session] = OrderedDict()
        self._ended_boots: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def enter(self, sender: Sender, identity: bytes) -> Session:
        """Raise ``stale`` or ``busy``."""
        if sender in self._sessions:
            self._sessions.move_to_end(sender)
            return self._sessions[sender]
        session = self._new_session(sender, identity)
        if session.boot in self._ended_boots:
            raise KVBusError("this boot id was ended here", code=ErrorCode.STALE)
        if len(self) >= self._limits.max_sessions:
            self._make_room(session.tenant)
        self._sessions[sender] = session
        return session

    def end_boot(self, boot: str) -> None:
        """End the sessions of a dead process; its later messages are ``stale``."""
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
        """End a session of the largest tenant; among equals, an idle one."""
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


class PendingCalls:
    def __init__(self, limits: ServerLimits) -> None:
        self._limits, self._number = limits, 0
        self._permits: dict[str, Permits[Call]] = {}

    def __len__(self) -> int:
        return self._number

    def share(self, op: str, most: int) -> None:
        self._permits[op] = Permits(most)

    # Requests that wait must not block requests that work. Acquires, renewals and commits are
    # answered at once, so they need no room. Among waiting requests, each tenant has its share of
    # the calls with one op.
    def add(self, call: Call, *, waits: bool) -> bool:
        """Return whether another call lost its place; raise ``busy``."""
        own, lost = call.session.pending, None
        if waits:
            limits = self._limits
            if len(self) >= limits.max_pending or len(own) >= limits.max_session_pending:
                raise KVBusError("too many requests in progress", code=ErrorCode.BUSY)
            if (permits := self._permits.get(call.op)) is not None:
                lost = permits.acquire(call.session.tenant, call)
        if lost is not None:
            lost.end(
                KVBusError(
                    "displaced by a tenant with fewer requests in progress", code=ErrorCode.BUSY
                )
            )
        own[call.request_id] = call
        self._number += 1
        return lost is not None

    def remove(self, call: Call) -> None:
        if call.session.pending.pop(call.request_id, None) is not None:
            self._number -= 1
            if (permits := self._permits.get(call.op)) is not None:
                permits.release(call)
