"""Who has how much of something bounded, so that who has most gives way when it is full (pure)."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from kvbus.errors import ErrorCode, LocalError
from kvbus.table.table import Deadlines

Party = Hashable
"""Whoever pays for what it asks for: a key, or a connection where there are no keys."""
T = TypeVar("T", bound=Hashable)


class Shares:
    """What each party has, in any unit; each call takes O(log n) for n parties."""

    def __init__(self) -> None:
        self._held: dict[Party, int] = {}
        self._most_first: Deadlines[Party] = Deadlines()

    def of(self, party: Party) -> int:
        """What a party has."""
        return self._held.get(party, 0)

    def add(self, party: Party, amount: int) -> None:
        """It has ``amount`` more, or less."""
        held = self._held[party] = self.of(party) + amount
        if not held:
            del self._held[party]
        self._most_first.set(party, -held if held else None)

    def largest(self) -> Party | None:
        """Who has most, None when nobody has anything."""
        return self._most_first.first()

    def gives_way_to(self, party: Party) -> Party | None:
        """Who has to give one to ``party``, so that their shares come closer; None if nobody."""
        largest = self.largest()
        return largest if self.of(largest) > self.of(party) + 1 else None


class Places(Generic[T]):
    """At most ``most`` things at a time, in fair shares of the parties that want any.

    A party alone may have all. When all are taken, one that has fewer gets the newest of who has
    most: an equal share is never refused or lost, whatever others ask for.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._shares = Shares()
        self._things: dict[Party, dict[T, None]] = {}
        self._party_of: dict[T, Party] = {}

    def __len__(self) -> int:
        return len(self._party_of)

    def __contains__(self, thing: object) -> bool:
        return thing in self._party_of

    def enter(self, party: Party, thing: T) -> T | None:
        """Give ``thing`` a place; returns what has lost its own for it.

        Raises `LocalError` (``busy``) when all are taken, and others have no more than ``party``.
        """
        lost = None
        if len(self) >= self._most:
            largest = self._shares.gives_way_to(party)
            if largest is None:
                raise LocalError(
                    f"all {self._most} places are taken, {self._shares.of(party)} of them by this "
                    "sender",
                    code=ErrorCode.BUSY,
                )
            lost = next(reversed(self._things[largest]))
            self.leave(lost)
        self._things.setdefault(party, {})[thing] = None
        self._party_of[thing] = party
        self._shares.add(party, 1)
        return lost

    def leave(self, thing: T) -> None:
        """It needs its place no more; one that has none is ok."""
        party = self._party_of.pop(thing, None)
        if party is None:
            return
        things = self._things[party]
        del things[thing]
        if not things:
            del self._things[party]
        self._shares.add(party, -1)
