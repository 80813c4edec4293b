"""Whether what somebody shows is the right to what they ask.

Refuses without detail, and in a time that does not tell how much of it was right.
"""

import hmac

from kvbus.errors import ErrorCode, LocalError


def check_right(shown: str | None, *rights: str) -> None:
    """Raise `LocalError` (``forbidden``) unless ``shown`` is one of ``rights``."""
    if shown is None or not any(_equal(shown, right) for right in rights):
        raise LocalError("that is not yours to ask", code=ErrorCode.FORBIDDEN)


def _equal(shown: str, right: str) -> bool:
    return hmac.compare_digest(shown.encode(), right.encode())
