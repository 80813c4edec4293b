"""Whose slice is next, among the reads from one peer."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Two queues that are served alternately, so a short read waits for one long slice at most."""

    __slots__ = ("_long", "_short", "_short_is_next")

    def __init__(self) -> None:
        self._short: deque[T] = deque()
        self._long: deque[T] = deque()
        self._short_is_next = True

    def __bool__(self) -> bool:
        return bool(self._short or self._long)

    def add(self, item: T, *, short: bool) -> None:
        """Put ``item`` at the end of its queue."""
        (self._short if short else self._long).append(item)

    def take(self) -> T | None:
        """The next one, or None when nobody waits."""
        chosen = self._short if self._short_is_next else self._long
        if not chosen:
            chosen = self._long if self._short_is_next else self._short
        if not chosen:
            return None
        self._short_is_next = chosen is self._long
        return chosen.popleft()
