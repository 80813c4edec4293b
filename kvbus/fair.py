"""Fair queues and fair shares (pure)."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from kvbus.errors import ErrorCode, LocalError

T = TypeVar("T", bound=Hashable)

FAIR_TURN = 8
"""Urgency is ignored once in this many turns."""


class Key(NamedTuple):
    owner: Hashable
    priority: int = 0


def _anyone(_: Hashable) -> bool:
    return True


# A queue serves urgent items first, owner by owner, and never starves an item:
#
#     priority 9   a: 1 2 3   b: 4      1, 4, 2, 3: the greatest priority, and there owner by owner
#     priority 0   c: 5 6     d: 7      in every 8th turn 5, 7, 6: the priority that has not had a
#                                       turn for longest, and there owner by owner as well
#
# If m priorities have waiting items, each gets at least one turn in 8 m, whatever arrives later.
# In these turns, each owner has one turn before any has a second.
class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._waiting: OrderedDict[int, OrderedDict[Hashable, dict[T, None]]] = OrderedDict()
        self._num_waiting = self._num_taken = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, key: Key, item: T) -> None:
        self._waiting.setdefault(key.priority, OrderedDict()).setdefault(key.owner, {})[item] = None
        self._num_waiting += 1

    def discard(self, key: Key, item: T) -> None:
        owners = self._waiting[key.priority]
        del owners[key.owner][item]
        self._num_waiting -= 1
        if not owners[key.owner]:
            del owners[key.owner]
        if not owners:
            del self._waiting[key.priority]

    def take(self, may: Callable[[Hashable], bool] = _anyone) -> tuple[Key, T] | None:
        """None if no waiting owner ``may``."""
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
    """``may_have(num_held, num_free)`` decides whether an owner gets another slot."""

    def __init__(self, num_slots: int, *, may_have: Callable[[int, int], bool]) -> None:
        super().__init__()
        self._may_have = may_have
        self._free = list(reversed(range(num_slots)))
        self._owners: dict[int, Hashable] = {}
        self._num_held: Counter[Hashable] = Counter()

    @property
    def num_in_use(self) -> int:
        return len(self._owners)

    def acquire(self) -> tuple[T, int] | None:
        num_free = len(self._free)
        if not num_free:
            return None
        taken = self.take(lambda owner: self._may_have(self._num_held[owner], num_free))
        if taken is None:
            return None
        key, item = taken
        return item, self._give(key.owner)

    def acquire_at_once(self, owner: Hashable) -> int | None:
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
        owner = self._owners.pop(slot)
        self._num_held[owner] -= 1
        if not self._num_held[owner]:
            del self._num_held[owner]
        self._free.append(slot)


Tenant = Hashable
"""Accounting unit of requests: a key, or a connection without keys."""


class Permits(Generic[T]):
    """If all permits are taken, a tenant with fewer gets the newest one of the tenant with most.

    So an equal share is never refused or lost.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._things: dict[Tenant, dict[T, None]] = {}
        self._tenant_of: dict[T, Tenant] = {}
        self._having: defaultdict[int, dict[Tenant, None]] = defaultdict(dict)
        """By number of things, as strangers may fill all places."""
        self._largest = 0

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, thing: object) -> bool:
        return thing in self._tenant_of

    def acquire(self, tenant: Tenant, thing: T) -> T | None:
        """Return the thing that lost its place. Raises `LocalError` (``busy``)."""
        lost, num_own = None, len(self._things.get(tenant, ()))
        if len(self) >= self._most:
            if self._largest <= num_own + 1:
                raise LocalError(
                    f"all {self._most} places are taken, {num_own} of them by this sender",
                    code=ErrorCode.BUSY,
                )
            lost = next(reversed(self._things[next(iter(self._having[self._largest]))]))
            self.release(lost)
        self._things.setdefault(tenant, {})[thing] = None
        self._tenant_of[thing] = tenant
        self._count(tenant, num_own, num_own + 1)
        return lost

    def release(self, thing: T) -> None:
        if thing not in self._tenant_of:
            return
        tenant = self._tenant_of.pop(thing)
        things = self._things[tenant]
        del things[thing]
        self._count(tenant, len(things) + 1, len(things))
        if not things:
            del self._things[tenant]

    def _count(self, tenant: Tenant, before: int, now: int) -> None:
        self._having[before].pop(tenant, None)
        if now:
            self._having[now][tenant] = None
        if now > self._largest or not self._having[self._largest]:
            self._largest = now
