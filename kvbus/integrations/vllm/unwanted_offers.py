"""Offers that a decode engine does not need: their prefill engine gets its blocks back early.

An offer that cannot be released expires by itself. Releases wait while there is no agent, and for
each other, so that loads find it free.
"""

import logging
from collections import deque
from functools import partial

from kvbus.engine import DecodeSession, Fetch
from kvbus.engine.session import ControlSession
from kvbus.errors import ErrorCode, KVBusError
from kvbus.integrations.vllm.sessions import ControlLink
from kvbus.integrations.vllm.transfer_params import HandoffParams
from kvbus.protocol.engine import Outcome

logger = logging.getLogger("vllm.kvbus")

MAX_WAITING = 1024
"""Offers that wait; the first of more are left to expire."""
MAX_UNDER_WAY = 16


class UnwantedOffers:
    """The offers that one decode engine does not need; `release` may be called in any thread."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._waiting: deque[tuple[str, HandoffParams]] = deque(maxlen=MAX_WAITING)
        self._num_under_way = 0
        link.when_open(self._begin)

    def release(self, request_id: str, handoff: HandoffParams) -> None:
        """The KV of a request is not needed."""
        self._link.post(partial(self._add, request_id, handoff))

    def _add(self, request_id: str, handoff: HandoffParams, session: ControlSession | None) -> None:
        self._waiting.append((request_id, handoff))
        self._begin(session)

    def _begin(self, session: ControlSession | None) -> None:
        if not isinstance(session, DecodeSession) or session.lost is not None:
            return
        while self._waiting and self._num_under_way < MAX_UNDER_WAY:
            request_id, handoff = self._waiting.popleft()
            stop = handoff.remote_num_tokens
            try:
                fetch = session.fetch(
                    handoff.ticket, num_tokens=stop, first_token=stop, block_ids={}
                )
            except KVBusError:  # it has no room for a request: with the next release
                self._waiting.append((request_id, handoff))
                return
            self._num_under_way += 1
            fetch.when_ended(partial(self._on_ended, request_id, handoff, session, fetch))

    def _on_ended(
        self, request_id: str, handoff: HandoffParams, session: DecodeSession, fetch: Fetch
    ) -> None:
        self._num_under_way -= 1
        notice = fetch.notice
        if notice is None or notice.stage == "lost" or notice.code == ErrorCode.DRAINING:
            # the agent is gone, or goes: the next one does it
            self._waiting.append((request_id, handoff))
            return
        if notice.outcome is not Outcome.COMPLETED:
            logger.info(
                "kvbus: request %s: its offer, which is not needed, was not released: %s [%s]",
                request_id,
                notice.message,
                notice.code,
            )
        self._begin(session)
