"""The number of examples of a property test."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "kvbus")
SHARE = 4


def num_examples(long: int, share: int = SHARE) -> int:
    """``long`` in the profile ``long`` (`make test-long`), otherwise ``long`` / ``share``."""
    return long if PROFILE == "long" else -(-long // share)
