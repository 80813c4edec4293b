"""Who is next of those that wait: the most urgent one, and now and then who has waited longest.

    a0 b9 c0 d9 wait    b d .....  the most urgent first, and of these who came first
                        every 8th  a, who came before all others

Who comes when n others wait is next within 8 (n + 1) turns, whatever comes later: each eighth turn
takes one away that came before. Where all are equally urgent, they are next as they came.
"""

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

FAIR_TURN = 8
"""Every so many turns urgency does not matter."""


class Turns:
    """Counts turns, and says which of them are fair."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def next_is_fair(self) -> bool:
        """Begin the next turn: whether urgency does not matter in it."""
        return next(self._numbers) % FAIR_TURN == 0


class UrgentFirst(Generic[T]):
    """Items that wait, each once; a greater ``priority`` is more urgent."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: OrderedDict[T, tuple[int, int]] = OrderedDict()
        self._by_urgency: list[tuple[int, int, T]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def priority(self) -> int:
        """That of the most urgent one; raises `IndexError` when nobody waits."""
        self._skip_gone()
        return -self._by_urgency[0][0]

    def add(self, item: T, priority: int = 0) -> None:
        """Wait behind all that are as urgent."""
        rank = -priority, next(self._numbers)
        self._waiting[item] = rank
        heappush(self._by_urgency, (*rank, item))

    def discard(self, item: T) -> None:
        """Do not wait any more; raises `KeyError`."""
        del self._waiting[item]
        self._forget_gone()

    def take(self, *, fair: bool) -> T:
        """The most urgent one, in a ``fair`` turn who came first; raises when nobody waits."""
        if fair:
            item, _ = self._waiting.popitem(last=False)
            self._forget_gone()
            return item
        self._skip_gone()
        item = heappop(self._by_urgency)[2]
        del self._waiting[item]
        return item

    def _skip_gone(self) -> None:
        while self._by_urgency and self._is_gone(self._by_urgency[0]):
            heappop(self._by_urgency)

    def _is_gone(self, entry: tuple[int, int, T]) -> bool:
        *rank, item = entry
        return self._waiting.get(item) != tuple(rank)

    def _forget_gone(self) -> None:
        """Keep no more of those that are gone than there are others."""
        if len(self._by_urgency) > 2 * len(self._waiting) + FAIR_TURN:
            self._by_urgency = [(*rank, item) for item, rank in self._waiting.items()]
            heapify(self._by_urgency)
