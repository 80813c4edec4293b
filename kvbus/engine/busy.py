"""How long to wait before an agent is asked again that had no room for a request.

Refuses to come back earlier than the agent said, and in step with others that it turned away: each
pause is drawn.
"""

import random

from kvbus.errors import ErrorCode, KVBusError, RequestRefused

FIRST_S, MOST_S = 0.02, 2.0
"""Pauses of our own choice; an agent may ask for more."""


class BusyPauses:
    """The pauses of one request; it is given up when the next would end after ``deadline``."""

    def __init__(self, deadline: float) -> None:
        self._deadline, self._own_s = deadline, FIRST_S

    def after(self, error: KVBusError, now: float) -> float | None:
        """Seconds to wait; None when ``error`` is another one, or there is no time left.

        Longer from refusal to refusal, so that an agent that stays full is asked ever less.
        """
        if not isinstance(error, RequestRefused) or error.code is not ErrorCode.BUSY:
            return None
        hint = error.detail.get("retry_after_s")
        hint_s = hint if isinstance(hint, int | float) else 0.0
        least_s = max(self._own_s, hint_s)  # in this order: a hint may be no number at all
        self._own_s = min(MOST_S, 2 * self._own_s)
        pause_s = least_s * random.uniform(1.0, 2.0)  # noqa: S311 - no secret
        return pause_s if now + pause_s < self._deadline else None
