"""The receiving end of notices: in order and once, over any number of losses and resends.

Refuses to hold more than `MAX_HELD` notices that came before their turn: those further ahead are
not acknowledged, so the sender sends them again.
"""

from collections import deque
from collections.abc import Iterator

from kvbus.protocol.engine import MAX_TOLD
from kvbus.protocol.envelope import Notice

MAX_HELD = 64


class NoticeInbox:
    """The notices of one boot of the sender."""

    def __init__(self) -> None:
        self.delivered_upto = 0
        self.acknowledge_due = False
        self.num_repeated = 0
        self.told_upto = 0
        """Behind `delivered_upto` until who waits for what was delivered goes on."""
        self._told_s: deque[float] = deque(maxlen=MAX_TOLD)
        self._held: dict[int, Notice] = {}

    def accept(self, notice: Notice) -> Iterator[Notice]:
        """Take ``notice``; yields those whose turn has come, each taken for delivered."""
        ahead = notice.seq - self.delivered_upto
        if ahead <= 0:
            self.num_repeated += 1
            self.acknowledge_due = True  # it comes again because no acknowledgement has arrived
        elif notice.seq in self._held:
            self.num_repeated += 1
        elif ahead <= MAX_HELD:
            self._held[notice.seq] = notice
        while (due := self._held.pop(self.delivered_upto + 1, None)) is not None:
            self.delivered_upto += 1
            self.acknowledge_due = True
            yield due

    def note_told(self, now: float) -> None:
        """Who waited for what was delivered goes on now."""
        self._told_s.extend([now] * (self.delivered_upto - self.told_upto))
        self.told_upto = self.delivered_upto

    def take_told(self) -> tuple[float, ...]:
        """When the last ones up to `told_upto` were told, once; they are to be acknowledged."""
        told_s = tuple(self._told_s)
        self._told_s.clear()
        self.acknowledge_due = self.told_upto < self.delivered_upto
        return told_s
