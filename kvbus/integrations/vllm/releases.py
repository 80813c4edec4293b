"""Offers that a decode engine does not need: their prefill engine gets its blocks back early.

Refuses to report how it ends: an offer that cannot be released expires by itself. While there is no
agent to tell it, it waits for one.
"""

import logging
from collections import deque
from functools import partial

from kvbus.engine import DecodeSession, Fetch
from kvbus.integrations.vllm.contract import HandoffParams
from kvbus.integrations.vllm.link import AgentLink
from kvbus.integrations.vllm.sessions import ControlSession
from kvbus.protocol.engine import Outcome

logger = logging.getLogger("vllm.kvbus")

MAX_WAITING = 1024
"""Offers that wait for an agent; those of the requests that came first are left to expire."""


class Releases:
    """The offers that one decode engine does not need; `release` may be called in any thread."""

    def __init__(self, link: AgentLink[ControlSession]) -> None:
        self._link = link
        self._waiting: deque[tuple[str, HandoffParams]] = deque(maxlen=MAX_WAITING)
        link.when_up(self._catch_up)

    def release(self, request_id: str, handoff: HandoffParams) -> None:
        """The KV of a request is not needed."""
        self._link.post(partial(self._begin, request_id, handoff))

    def _catch_up(self, session: ControlSession) -> None:
        """The agent is there, again."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for request_id, handoff in waiting:
            self._begin(request_id, handoff, session)

    def _begin(
        self, request_id: str, handoff: HandoffParams, session: ControlSession | None
    ) -> None:
        if session is None or session.lost is not None:
            self._waiting.append((request_id, handoff))
        elif isinstance(session, DecodeSession):
            stop = handoff.remote_num_tokens
            fetch = session.fetch(handoff.ticket, num_tokens=stop, first_token=stop, block_ids={})
            fetch.when_ended(partial(self._on_ended, request_id, handoff, fetch))

    def _on_ended(self, request_id: str, handoff: HandoffParams, fetch: Fetch) -> None:
        notice = fetch.notice
        if notice is None:  # the agent is gone, perhaps before it told the prefill side
            self._waiting.append((request_id, handoff))
        elif notice.outcome is not Outcome.COMPLETED:
            logger.info(
                "kvbus: request %s: its offer, which is not needed, was not released: %s [%s]",
                request_id,
                notice.message,
                notice.code,
            )
