"""How many examples a property test draws, and how often a rule of a state machine is drawn."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis.stateful import precondition

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "kvbus")
SHARE = 4


def num_examples(long: int, share: int = SHARE) -> int:
    """``long`` in the profile of that name (`make test-long`), else one of ``share`` of it."""
    return long if PROFILE == "long" else -(-long // share)


def rarely(one_in: int) -> Callable[[Any], Any]:
    """Enables a rule that ends much at once in one of ``one_in`` steps only."""
    return precondition(lambda world: world.num_events % one_in == one_in - 1)
