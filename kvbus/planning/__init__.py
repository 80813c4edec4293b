"""Who reads what from whom, and the descriptors of it.

Refuses to touch memory: addresses are numbers here.
"""

from kvbus.planning.compatibility import check_compatible
from kvbus.planning.direct import Descriptors, DirectPlan
from kvbus.planning.pairs import PlacedRank

__all__ = ["Descriptors", "DirectPlan", "PlacedRank", "check_compatible"]
