"""A bounded pool of slots, and who waits for one: key by key in turn, and no key takes all.

waiting   a: 1 2 3      the next slot goes to a's 1, then to b's 4, then to a's 2, ...
          b: 4          as long as `may_have` says that the key may hold one more
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class FairPool(Generic[K, T]):
    """Slots 0 to ``num_slots`` - 1 for items, each of which waits under a key.

    ``may_have(num_held, num_free)`` says whether a key that holds so many may have one more.
    Between two slots for a key that may, no other key gets more than one.
    """

    def __init__(self, num_slots: int, *, may_have: Callable[[int, int], bool]) -> None:
        self._may_have = may_have
        self._free = list(reversed(range(num_slots)))
        self._holders: dict[int, K] = {}
        self._num_held: defaultdict[K, int] = defaultdict(int)
        self._waiting: OrderedDict[K, OrderedDict[T, None]] = OrderedDict()

    @property
    def num_in_use(self) -> int:
        """Slots that somebody has."""
        return len(self._holders)

    @property
    def num_waiting(self) -> int:
        """Items without a slot."""
        return sum(map(len, self._waiting.values()))

    def wait(self, key: K, item: T) -> None:
        """Wait behind the key's own items; a key that had none waits behind all others."""
        self._waiting.setdefault(key, OrderedDict())[item] = None

    def leave(self, key: K, item: T) -> None:
        """Do not wait any more."""
        items = self._waiting[key]
        del items[item]
        if not items:
            del self._waiting[key]

    def acquire(self) -> tuple[T, int] | None:
        """The item whose turn it is, and its slot; None when no slot is free for any that waits."""
        num_free = len(self._free)
        if not self._waiting or not num_free:
            return None
        for key in self._waiting:
            if self._may_have(self._num_held.get(key, 0), num_free):
                break
        else:
            return None
        items = self._waiting[key]
        item, _ = items.popitem(last=False)
        if items:
            self._waiting.move_to_end(key)
        else:
            del self._waiting[key]
        slot = self._free.pop()
        self._holders[slot] = key
        self._num_held[key] += 1
        return item, slot

    def release(self, slot: int) -> None:
        """The slot is free again; raises `KeyError` when nobody had it."""
        key = self._holders.pop(slot)
        self._num_held[key] -= 1
        if not self._num_held[key]:
            del self._num_held[key]
        self._free.append(slot)
