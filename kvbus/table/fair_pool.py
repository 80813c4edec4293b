"""A bounded pool of slots, and who waits for one: key by key in turn, and no key takes all.

waiting   a: 1 2 3      the next slot goes to a's 1, then to b's 4, then to a's 2, ...
          b: 4          as long as `may_have` says that the key may hold one more

More urgent items come first, of all keys that may have one more, but not in each turn
(`kvbus.table.urgent_first`).
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvbus.table.urgent_first import Turns, UrgentFirst

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class FairPool(Generic[K, T]):
    """Slots 0 to ``num_slots`` - 1 for items, each of which waits under a key.

    ``may_have(num_held, num_free)`` says whether a key that holds so many may have one more.
    Between two slots for a key that may, no other key gets more than one, if no item is more urgent
    than others.
    """

    def __init__(self, num_slots: int, *, may_have: Callable[[int, int], bool]) -> None:
        self._may_have = may_have
        self._free = list(reversed(range(num_slots)))
        self._holders: dict[int, K] = {}
        self._num_held: defaultdict[K, int] = defaultdict(int)
        self._waiting: OrderedDict[K, UrgentFirst[T]] = OrderedDict()
        self._priorities: dict[T, int] = {}
        self._num_of_priority: Counter[int] = Counter()
        self._turns = Turns()

    @property
    def num_in_use(self) -> int:
        """Slots that somebody has."""
        return len(self._holders)

    @property
    def num_waiting(self) -> int:
        """Items without a slot."""
        return len(self._priorities)

    def wait(self, key: K, item: T, priority: int = 0) -> None:
        """Wait behind the key's own items; a key that had none waits behind all others."""
        self._waiting.setdefault(key, UrgentFirst()).add(item, priority)
        self._priorities[item] = priority
        self._num_of_priority[priority] += 1

    def leave(self, key: K, item: T) -> None:
        """Do not wait any more."""
        items = self._waiting[key]
        items.discard(item)
        self._forget(item)
        if not items:
            del self._waiting[key]

    def acquire(self) -> tuple[T, int] | None:
        """The item whose turn it is, and its slot; None when no slot is free for any that waits."""
        num_free = len(self._free)
        if not self._waiting or not num_free:
            return None
        may = (k for k in self._waiting if self._may_have(self._num_held.get(k, 0), num_free))
        key = next(may, None)
        if key is None:
            return None
        is_fair = self._turns.next_is_fair()
        if not is_fair and len(self._num_of_priority) > 1:
            key = max((key, *may), key=lambda one: self._waiting[one].priority)
        return self._grant(key, fair=is_fair)

    def release(self, slot: int) -> None:
        """The slot is free again; raises `KeyError` when nobody had it."""
        key = self._holders.pop(slot)
        self._num_held[key] -= 1
        if not self._num_held[key]:
            del self._num_held[key]
        self._free.append(slot)

    def _grant(self, key: K, *, fair: bool) -> tuple[T, int]:
        items = self._waiting[key]
        item = items.take(fair=fair)
        self._forget(item)
        if items:
            self._waiting.move_to_end(key)
        else:
            del self._waiting[key]
        slot = self._free.pop()
        self._holders[slot] = key
        self._num_held[key] += 1
        return item, slot

    def _forget(self, item: T) -> None:
        priority = self._priorities.pop(item)
        self._num_of_priority[priority] -= 1
        if not self._num_of_priority[priority]:
            del self._num_of_priority[priority]
