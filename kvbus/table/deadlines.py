"""One next deadline for each key, the earliest first; times are only compared."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A heap with lazy deletion: a key has at most one deadline, set again as often as needed."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0

    @property
    def bound(self) -> float | None:
        """No deadline is before this; it costs no search, unlike `next`."""
        return self._heap[0][0] if self._heap else None

    def set(self, key: K, when: float | None) -> None:
        """Make ``when`` the deadline of ``key``, in place of any earlier one; None for none."""
        if when is None:
            self._when.pop(key, None)
            return
        if self._when.get(key) == when:
            return
        self._when[key] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, key))
        if len(self._heap) > 64 + 4 * len(self._when):
            self._rebuild()

    def discard(self, key: K) -> None:
        """Forget the deadline of ``key``, if it has one."""
        self._when.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline, or None when there is none."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Iterator[K]:
        """Each key whose deadline is not after ``now``; its deadline is forgotten first."""
        while (when := self.next()) is not None and when <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._when[key]
            yield key

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        when, _, key = entry
        return self._when.get(key) == when

    def _rebuild(self) -> None:
        self._heap = [(when, order, key) for order, (key, when) in enumerate(self._when.items())]
        heapq.heapify(self._heap)
