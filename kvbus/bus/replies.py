"""The replies that were sent, kept to answer a repeated request without doing it again.

Refuses to grow: by age, by number and by bytes. Who has most loses its own oldest replies first, so
that others keep theirs; those of a session go with it. Repeats come soon or never.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbus.bus.sender import Sender
from kvbus.table import Party, Shares

ReplyKey = tuple[Sender, int]

KEPT_BYTES = 400
"""About what a kept reply takes beside its frame: measured, on Python 3.12."""
KEPT_S = 60.0


class KeptReply(NamedTuple):
    """The frame of a reply, and the hash of the request's frame, which a repeat has as well."""

    frame: bytes
    fingerprint: int
    sent_at: float = 0.0

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return len(self.frame) + KEPT_BYTES


@dataclass(slots=True)
class _Kept:
    """The replies to one sender, by request id, and who pays for them."""

    party: Party
    replies: dict[int, KeptReply] = field(default_factory=dict)


class ReplyCache:
    """Replies by sender and request id; each sender has one party, which pays for what is kept."""

    def __init__(self, *, max_replies: int, max_bytes: int) -> None:
        self._max_replies, self._max_bytes = max_replies, max_bytes
        self._kept: dict[Sender, _Kept] = {}
        self._queues: dict[Party, OrderedDict[ReplyKey, KeptReply]] = {}
        self._shares = Shares()
        self._num_replies = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_replies

    def get(self, key: ReplyKey) -> KeptReply | None:
        """What answered ``key``, if it is still kept."""
        kept = self._kept.get(key[0])
        return kept.replies.get(key[1]) if kept is not None else None

    def put(self, key: ReplyKey, reply: KeptReply, party: Party) -> list[ReplyKey]:
        """Keep ``reply``; returns the keys whose replies had to go, most often one or none."""
        sender, request_id = key
        kept = self._kept.setdefault(sender, _Kept(party))
        kept.replies[request_id] = reply
        self._count(kept.party, reply.num_bytes, 1)
        queue = self._queues.setdefault(kept.party, OrderedDict())
        queue[key] = reply
        evicted = []
        while next(iter(queue.values())).sent_at < reply.sent_at - KEPT_S:
            evicted.append(self._evict(kept.party))
        while self._num_replies > self._max_replies or self.num_bytes > self._max_bytes:
            evicted.append(self._evict(self._shares.largest()))
        return evicted

    def forget(self, sender: Sender) -> None:
        """Drop all that is kept for a sender."""
        kept = self._kept.get(sender)
        for request_id in list(kept.replies) if kept is not None else ():
            self.drop((sender, request_id))

    def drop(self, key: ReplyKey) -> None:
        """Keep what answered ``key`` no longer."""
        sender, request_id = key
        kept = self._kept[sender]
        self._count(kept.party, -kept.replies.pop(request_id).num_bytes, -1)
        queue = self._queues[kept.party]
        del queue[key]
        if not queue:
            del self._queues[kept.party]
        if not kept.replies:
            del self._kept[sender]

    def _evict(self, party: Party) -> ReplyKey:
        """Drop the oldest of who has some."""
        key = next(iter(self._queues[party]))
        self.drop(key)
        return key

    def _count(self, party: Party, num_bytes: int, number: int) -> None:
        self._shares.add(party, num_bytes)
        self.num_bytes += num_bytes
        self._num_replies += number
