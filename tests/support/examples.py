"""How many examples a property test draws, and how often a rule of a state machine is drawn."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "kvbus")
SHARE = 4


def num_examples(long: int, share: int = SHARE) -> int:
    """``long`` in the profile of that name (`make test-long`), else one of ``share`` of it."""
    return long if PROFILE == "long" else -(-long // share)
