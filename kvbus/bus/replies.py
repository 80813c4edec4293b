"""The replies that were sent, kept to answer a repeated request without doing it again.

Refuses to grow: the oldest replies of all sessions go first, by number and by bytes, since
repeats come soon or never.
"""

from collections import OrderedDict

ReplyKey = tuple[str, int]


class ReplyCache:
    """Frames by (boot, request id), first in first out."""

    def __init__(self, *, max_replies: int, max_bytes: int) -> None:
        self._max_replies, self._max_bytes = max_replies, max_bytes
        self._frames: OrderedDict[ReplyKey, bytes] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def get(self, key: ReplyKey) -> bytes | None:
        """The frame that answered ``key``, if it is still kept."""
        return self._frames.get(key)

    def put(self, key: ReplyKey, frame: bytes) -> list[ReplyKey]:
        """Keep ``frame``; returns the keys whose frames had to go, most often one or none."""
        self._frames[key] = frame
        self.num_bytes += len(frame)
        evicted = []
        while len(self._frames) > self._max_replies or self.num_bytes > self._max_bytes:
            oldest, old_frame = self._frames.popitem(last=False)
            self.num_bytes -= len(old_frame)
            evicted.append(oldest)
        return evicted
