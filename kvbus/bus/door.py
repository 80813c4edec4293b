"""The connections to one bound socket: who comes in, and how much each may leave lying.

Refuses connections too many, those of an address that was just sent away, and ends those that
keep more bytes waiting than they may. Pure but for the connections themselves.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvbus.bus.accepted import Accepted
from kvbus.bus.traffic import Traffic

_MIB = 1024 * 1024
ALL_CONNECTIONS = 4
AWAY_S = 1.0
SILENT_S = 5.0
_HEARTBEATS_S = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """Bounds of one socket.

    ``unread_bytes`` of one connection may have come in without having been handed out, and
    ``unsent_bytes`` may have been sent without being acknowledged; of all connections
    `ALL_CONNECTIONS` times as much. Bytes are counted on the wire: ZeroMQ holds an empty frame,
    which came in two bytes, in 64. ``messages`` is how many one connection may send in its life.
    ``new_by_address_s`` connections of one address a second may begin a handshake.
    """

    connections: int = 1024
    connections_by_address: int = 256
    new_by_address_s: int = 500
    unread_bytes: int = 6 * _MIB
    unsent_bytes: int = 32 * _MIB
    messages: int | None = None


class EndReason(StrEnum):
    """Why a connection was ended."""

    TOO_MANY = "too many connections"
    TOO_MANY_OF_ADDRESS = "too many connections of one address"
    TOO_FAST = "too many new connections of one address in this second"
    SENT_AWAY = "its address was sent away a moment ago"
    NO_DESCRIPTORS = "descriptors are short"
    SILENT = "it said nothing while others wanted in"
    UNREAD = "it has sent more than was read, or a message without end"
    UNSENT = "it does not take what it is sent"
    TOO_MANY_MESSAGES = "it has subscribed too often"
    UNWANTED = "it has asked a publisher for what is no topic"


class Ended(NamedTuple):
    """A connection was ended: whose, and why."""

    address: str
    reason: EndReason


class Door:
    """The connections of one socket; all but `traffic` belongs to the thread of the guard."""

    def __init__(self, name: str, limits: DoorLimits, *, has_keys: bool = False) -> None:
        self.name, self.limits = name, limits
        self.traffic = Traffic(has_keys=has_keys)
        self._entries: dict[int, _Entry] = {}
        self._by_address: Counter[str] = Counter()
        self._away_until: dict[str, float] = {}
        self._new_by_address: Counter[str] = Counter()
        self._second_ends = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, connection: Accepted, *, fd_bound: int) -> Ended | None:
        """A connection was accepted; returns whose was ended because of it, if any."""
        self.leave(connection.fd)
        entry = self._entries[connection.fd] = _Entry(connection, self.traffic)
        self._by_address[connection.address] += 1
        reason = self._refusal(connection, fd_bound)
        if reason is None:
            return None
        if reason is EndReason.TOO_MANY and (silent := self._silent(connection.accepted_at)):
            entry, reason = silent, EndReason.SILENT
        entry.connection.end()
        return Ended(entry.connection.address, reason)

    def leave(self, fd: int) -> None:
        """ZeroMQ has closed it."""
        entry = self._entries.pop(fd, None)
        if entry is None:
            return
        self.traffic.unwanted.discard(fd)
        self.traffic.left(fd)
        entry.connection.forget()
        address = entry.connection.address
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def close(self) -> None:
        """Forget all connections: the socket has closed them."""
        for fd in list(self._entries):
            self.leave(fd)

    def check(self, now: float, fds: Collection[int] | None = None) -> list[Ended]:
        """Count what waits, of ``fds`` or of all; returns whose connections were ended."""
        for fd in list(self._entries) if fds is None else self._entries.keys() & fds:
            entry = self._entries[fd]
            if not entry.count(self.traffic, now):
                self.leave(fd)
        self._away_until = {who: t for who, t in self._away_until.items() if t > now}
        found = [*self._over(), *self._over_all()]
        return [self._send_away(entry, reason, now) for entry, reason in found]

    def _refusal(self, connection: Accepted, fd_bound: int) -> EndReason | None:
        limits, address = self.limits, connection.address
        if connection.fd >= fd_bound:
            return EndReason.NO_DESCRIPTORS
        if self._away_until.get(address, 0.0) > connection.accepted_at:
            return EndReason.SENT_AWAY
        if self._num_new(address, connection.accepted_at) > limits.new_by_address_s:
            return EndReason.TOO_FAST
        if self._by_address[address] > limits.connections_by_address:
            return EndReason.TOO_MANY_OF_ADDRESS
        return EndReason.TOO_MANY if len(self._entries) > limits.connections else None

    def _num_new(self, address: str, now: float) -> int:
        """How many connections this address has made in this second, with the one that is made."""
        if now >= self._second_ends:
            self._second_ends = now + 1.0
            self._new_by_address.clear()
        self._new_by_address[address] += 1
        return self._new_by_address[address]

    def _silent(self, now: float) -> "_Entry | None":
        """The oldest connection that has said nothing for too long."""
        return next(
            (
                entry
                for entry in self._live
                if not entry.num_messages and now - entry.connection.accepted_at > SILENT_S
            ),
            None,
        )

    @property
    def _live(self) -> Iterator["_Entry"]:
        return (entry for entry in self._entries.values() if not entry.connection.ended)

    def _over(self) -> Iterator[tuple["_Entry", EndReason]]:
        """Those that are over a bound of their own."""
        for entry in self._live:
            if entry.connection.fd in self.traffic.unwanted:
                yield entry, EndReason.UNWANTED
            elif self.limits.messages is not None and entry.num_messages > self.limits.messages:
                yield entry, EndReason.TOO_MANY_MESSAGES
            elif entry.num_unread > self.limits.unread_bytes:
                yield entry, EndReason.UNREAD
            elif entry.num_unsent > self.limits.unsent_bytes:
                yield entry, EndReason.UNSENT

    def _over_all(self) -> Iterator[tuple["_Entry", EndReason]]:
        """The worst of all, when all together are over the bound."""
        live, limits = list(self._live), self.limits
        if sum(entry.num_unread for entry in live) > ALL_CONNECTIONS * limits.unread_bytes:
            yield max(live, key=lambda entry: entry.num_unread), EndReason.UNREAD
        if sum(entry.num_unsent for entry in live) > ALL_CONNECTIONS * limits.unsent_bytes:
            yield max(live, key=lambda entry: entry.num_unsent), EndReason.UNSENT

    def _send_away(self, entry: "_Entry", reason: EndReason, now: float) -> Ended:
        entry.connection.end()
        self._away_until[entry.connection.address] = now + AWAY_S
        return Ended(entry.connection.address, reason)


# What waits is the difference of two counts, of which some of ZeroMQ's own bytes are in one only:
# heartbeats, the handshake. They would add up for ever. So a count is set right when nothing can
# wait, which is seen only where little passes:
#
#     in     the socket was read until it was empty, and something of this connection was among
#            that: all that had come by the check before has been handed out, but for a part of the
#            one message that is not whole. A message that never ends hands nothing out.
#     out    the peer has acknowledged as many bytes as were sent, or more.
#
# A peer that only sends heartbeats hands nothing out either: it has `_HEARTBEATS_S` bytes free.
class _Entry:
    """A connection and its share of the traffic, from its start."""

    def __init__(self, connection: Accepted, traffic: Traffic) -> None:
        self.connection = connection
        self.num_unread = self.num_unsent = self.num_messages = 0
        self._in_behind = self._out_ahead = 0.0
        self._counted_at = connection.accepted_at
        fd = connection.fd
        self._delivered_from, self._sent_from = traffic.num_delivered[fd], traffic.num_sent[fd]
        self._messages_from, self._num_drains = traffic.num_messages[fd], traffic.num_drains

    def count(self, traffic: Traffic, now: float) -> bool:
        """Look at all counts; False when the connection is gone."""
        connection, received_before = self.connection, self.connection.num_received
        try:
            connection.count()
        except OSError:
            return False
        self._count_unread(traffic, received_before, now)
        sent = traffic.num_sent[connection.fd] - self._sent_from
        self._out_ahead = max(self._out_ahead, connection.num_acked - sent)
        self.num_unsent = round(sent + self._out_ahead) - connection.num_acked
        return True

    def _count_unread(self, traffic: Traffic, received_before: int, now: float) -> None:
        connection = self.connection
        drained = traffic.num_drains != self._num_drains
        num_messages = traffic.num_messages[connection.fd] - self._messages_from
        delivered = traffic.num_delivered[connection.fd] - self._delivered_from
        if drained and num_messages > self.num_messages:
            self._in_behind = max(self._in_behind, received_before - delivered)
        behind = connection.num_received - delivered
        free = self._in_behind + _HEARTBEATS_S * (now - self._counted_at)
        self._in_behind = max(self._in_behind, min(behind, free))
        self.num_messages, self._counted_at = num_messages, now
        self._num_drains = traffic.num_drains
        self.num_unread = max(0, round(behind - self._in_behind))
