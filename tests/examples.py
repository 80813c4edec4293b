"""How many examples a property test draws: a quarter, or all with HYPOTHESIS_PROFILE=long."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "kvbus")
SHARE = 4


def num_examples(long: int) -> int:
    """``long`` in the profile of that name (`make test-long`), else a quarter of it."""
    return long if PROFILE == "long" else -(-long // SHARE)
