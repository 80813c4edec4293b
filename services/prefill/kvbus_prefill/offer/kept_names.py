"""Holds of offers by name, before they are made (sans-IO)."""

from collections import OrderedDict

from kvbus.errors import LocalError
from kvbus.fair import Permits, Tenant


class KeptNames:
    """Holds of offers that are not made yet; each tenant has a fair share of the places.

    A hold without a place begins with the first renewal after its offer is made.
    """

    def __init__(self, most: int) -> None:
        self._permits: Permits[str] = Permits(most)
        self._ends: OrderedDict[str, float] = OrderedDict()

    def keep(self, name: str, now: float, keep_s: float, tenant: Tenant) -> None:
        self._remove(name)
        while self._ends and next(iter(self._ends.values())) <= now:
            self._remove(next(iter(self._ends)))
        try:
            lost = self._permits.acquire(tenant, name)
        except LocalError:  # busy
            return
        if lost is not None:
            del self._ends[lost]
        self._ends[name] = now + keep_s

    def pop(self, name: str, now: float) -> float:
        """End a hold; return the seconds that were left."""
        left_s = self._ends.get(name, now) - now
        self._remove(name)
        return left_s

    def _remove(self, name: str) -> None:
        self._permits.release(name)
        self._ends.pop(name, None)
