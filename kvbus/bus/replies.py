"""The replies that were sent, kept to answer a repeated request without doing it again.

Refuses to grow, by number and by bytes. Who has more than an equal share loses its own oldest
replies first, so that nobody can drive out those of others; repeats come soon or never.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbus.bus.sender import Sender

ReplyKey = tuple[Sender, int]

KEPT_BYTES = 300
"""About what a kept reply takes beside its frame: measured, on Python 3.12."""


class KeptReply(NamedTuple):
    """The frame of a reply, and the hash of the request's frame, which a repeat has as well."""

    frame: bytes
    fingerprint: int

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return len(self.frame) + KEPT_BYTES


@dataclass(slots=True)
class _Share:
    """The replies to who shares one part, first in first out."""

    kept: OrderedDict[ReplyKey, KeptReply] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ReplyCache:
    """Replies by sender and request id, in equal shares: see `Sender.share`."""

    def __init__(self, *, max_replies: int, max_bytes: int) -> None:
        self._max_replies, self._max_bytes = max_replies, max_bytes
        self._shares: dict[Hashable, _Share] = {}
        self._num_replies = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_replies

    def get(self, key: ReplyKey) -> KeptReply | None:
        """What answered ``key``, if it is still kept."""
        share = self._shares.get(key[0].share)
        return share.kept.get(key) if share is not None else None

    def put(self, key: ReplyKey, reply: KeptReply) -> list[ReplyKey]:
        """Keep ``reply``; returns the keys whose replies had to go, most often one or none."""
        owner = key[0].share
        share = self._shares.setdefault(owner, _Share())
        share.kept[key] = reply
        share.num_bytes += reply.num_bytes
        self.num_bytes += reply.num_bytes
        self._num_replies += 1
        evicted = []
        while self._num_replies > self._max_replies or self.num_bytes > self._max_bytes:
            evicted.append(self._evict(self._too_large(owner)))
        return evicted

    def forget(self, key: str) -> None:
        """Drop all that is kept for the clients of a CURVE key."""
        share = self._shares.pop(key, None)
        if share is not None:
            self.num_bytes -= share.num_bytes
            self._num_replies -= len(share.kept)

    def _too_large(self, owner: Hashable) -> Hashable:
        """Whose oldest frame goes: that of ``owner`` if it has an equal share, or of the largest.

        To look at ``owner`` first saves looking at all: whoever fills the cache has its share.
        """
        by_number = self._num_replies > self._max_replies

        def size(one: Hashable) -> int:
            share = self._shares[one]
            return len(share.kept) if by_number else share.num_bytes

        whole = self._num_replies if by_number else self.num_bytes
        if owner in self._shares and size(owner) * len(self._shares) >= whole:
            return owner
        return max(self._shares, key=size)

    def _evict(self, owner: Hashable) -> ReplyKey:
        share = self._shares[owner]
        key, reply = share.kept.popitem(last=False)
        share.num_bytes -= reply.num_bytes
        self.num_bytes -= reply.num_bytes
        self._num_replies -= 1
        if not share.kept:
            del self._shares[owner]
        return key
