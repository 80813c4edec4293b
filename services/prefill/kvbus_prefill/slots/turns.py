"""Who waits for a slot, and whose turn it is: one box of each lease, then one of each again.

Refuses to know slots; who may not have one now is the caller's to say.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable


class Turns:
    """Boxes that wait, by lease, in the order in which they came.

    Between two turns of a lease that may have one, no other lease has more than one.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, OrderedDict[int, None]] = OrderedDict()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def join(self, lease: Hashable, slot_id: int) -> None:
        """Wait behind the lease's own boxes; a lease that had none waits behind all others."""
        self._waiting.setdefault(lease, OrderedDict())[slot_id] = None
        self._num_waiting += 1

    def leave(self, lease: Hashable, slot_id: int) -> None:
        """Do not wait any more."""
        boxes = self._waiting[lease]
        del boxes[slot_id]
        self._num_waiting -= 1
        if not boxes:
            del self._waiting[lease]

    def take(self, may_have: Callable[[Hashable], bool]) -> int | None:
        """The box whose turn it is, of a lease that may have a slot; None when there is none."""
        lease = next(filter(may_have, self._waiting), None)
        if lease is None:
            return None
        slot_id = next(iter(self._waiting[lease]))
        self._waiting.move_to_end(lease)
        self.leave(lease, slot_id)
        return slot_id
