"""Who comes next, and who has how much, where there is not enough for all (pure).

A `FairQueue` serves urgent items first, owner by owner, and keeps none waiting for ever:

    priority 9   a: 1 2 3   b: 4      1, 4, 2, 3: the greatest priority, and there owner by owner
    priority 0   c: 5 6     d: 7      in every 8th turn 5, 7, 6: the priority that has not had a
                                      turn for longest, and there owner by owner as well

So where items of m priorities wait, each priority has one turn of 8 m at least, whatever comes
later, and in these turns no owner has a second one before each other owner has had one.

Of what is bounded and does not wait, `Places` takes from the party that has most.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from kvbus.errors import ErrorCode, LocalError

T = TypeVar("T", bound=Hashable)

FAIR_TURN = 8
"""In every so many turns urgency does not matter."""


class Key(NamedTuple):
    """What an item waits under; a greater ``priority`` is more urgent."""

    owner: Hashable
    priority: int = 0


def _anyone(_: Hashable) -> bool:
    return True


class FairQueue(Generic[T]):
    """Items that wait, each once; those of one key are served as they came."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, OrderedDict[Hashable, dict[T, None]]] = OrderedDict()
        self._num_waiting = self._num_taken = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, key: Key, item: T) -> None:
        """Wait behind the key's own items; a key that had none waits behind all others."""
        self._waiting.setdefault(key.priority, OrderedDict()).setdefault(key.owner, {})[item] = None
        self._num_waiting += 1

    def discard(self, key: Key, item: T) -> None:
        """Do not wait any more; raises `KeyError`."""
        owners = self._waiting[key.priority]
        del owners[key.owner][item]
        self._num_waiting -= 1
        if not owners[key.owner]:
            del owners[key.owner]
        if not owners:
            del self._waiting[key.priority]

    def take(self, may: Callable[[Hashable], bool] = _anyone) -> tuple[Key, T] | None:
        """The item whose turn it is, with its key; None when no owner that waits ``may``."""
        is_fair = (self._num_taken + 1) % FAIR_TURN == 0
        for priority in self._waiting if is_fair else sorted(self._waiting, reverse=True):
            owner = next(filter(may, self._waiting[priority]), self)
            if owner is not self:
                return self._take(Key(owner, priority))
        return None

    def _take(self, key: Key) -> tuple[Key, T]:
        owners = self._waiting[key.priority]
        item = next(iter(owners[key.owner]))
        self._num_taken += 1
        self._waiting.move_to_end(key.priority)
        owners.move_to_end(key.owner)
        self.discard(key, item)
        return key, item


class FairPool(FairQueue[T]):
    """Slots 0 to ``num_slots`` - 1, and a queue of the items that wait for one.

    ``may_have(num_held, num_free)`` says whether an owner that holds so many may have one more.
    """

    def __init__(self, num_slots: int, *, may_have: Callable[[int, int], bool]) -> None:
        super().__init__()
        self._may_have = may_have
        self._free = list(reversed(range(num_slots)))
        self._owners: dict[int, Hashable] = {}
        self._num_held: Counter[Hashable] = Counter()

    @property
    def num_in_use(self) -> int:
        """Slots that an owner has."""
        return len(self._owners)

    def acquire(self) -> tuple[T, int] | None:
        """The item whose turn it is, and its slot; None when no slot is free for any that waits."""
        num_free = len(self._free)
        if not num_free:
            return None
        taken = self.take(lambda owner: self._may_have(self._num_held[owner], num_free))
        if taken is None:
            return None
        key, item = taken
        return item, self._give(key.owner)

    def acquire_at_once(self, owner: Hashable) -> int | None:
        """A slot for what does not wait: there is a free one, and nothing waits for it."""
        num_free = len(self._free)
        if self._num_waiting or not num_free:
            return None
        if not self._may_have(self._num_held[owner], num_free):
            return None
        return self._give(owner)

    def _give(self, owner: Hashable) -> int:
        slot = self._free.pop()
        self._owners[slot] = owner
        self._num_held[owner] += 1
        return slot

    def release(self, slot: int) -> None:
        """The slot is free again; raises `KeyError` when no owner had it."""
        owner = self._owners.pop(slot)
        self._num_held[owner] -= 1
        if not self._num_held[owner]:
            del self._num_held[owner]
        self._free.append(slot)


Party = Hashable
"""Who pays for what is asked for: a key, or a connection where there are no keys."""


class Places(Generic[T]):
    """At most ``most`` things at a time, in fair shares of the parties that want any.

    A party alone may have all. When all are taken, one that has fewer gets the newest of the one
    that has most: an equal share is never refused or lost, whatever others ask for.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._things: dict[Party, dict[T, None]] = {}
        self._party_of: dict[T, Party] = {}
        self._having: defaultdict[int, dict[Party, None]] = defaultdict(dict)
        """The parties by how many things each has: strangers may be as many as there are places."""
        self._largest = 0

    def __len__(self) -> int:
        return len(self._party_of)

    def __contains__(self, thing: object) -> bool:
        return thing in self._party_of

    def enter(self, party: Party, thing: T) -> T | None:
        """Give ``thing`` a place; returns what has lost its own for it.

        Raises `LocalError` (``busy``) when all are taken, and others have no more than ``party``.
        """
        lost, num_own = None, len(self._things.get(party, ()))
        if len(self) >= self._most:
            if self._largest <= num_own + 1:
                raise LocalError(
                    f"all {self._most} places are taken, {num_own} of them by this sender",
                    code=ErrorCode.BUSY,
                )
            lost = next(reversed(self._things[next(iter(self._having[self._largest]))]))
            self.leave(lost)
        self._things.setdefault(party, {})[thing] = None
        self._party_of[thing] = party
        self._count(party, num_own, num_own + 1)
        return lost

    def leave(self, thing: T) -> None:
        """It needs its place no more; one that has none is ok."""
        if thing not in self._party_of:
            return
        party = self._party_of.pop(thing)
        things = self._things[party]
        del things[thing]
        self._count(party, len(things) + 1, len(things))
        if not things:
            del self._things[party]

    def _count(self, party: Party, before: int, now: int) -> None:
        """``party`` has one thing more, or one less."""
        self._having[before].pop(party, None)
        if now:
            self._having[now][party] = None
        if now > self._largest or not self._having[self._largest]:
            self._largest = now
