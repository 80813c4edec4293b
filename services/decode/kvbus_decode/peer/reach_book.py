"""Which agents answer, by where they are; outlives the connections to them.

Refuses those that a fetch would only wait for: they are asked by one fetch at a time, now and then.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

import structlog

from kvbus.errors import ErrorCode, RemoteError
from kvbus_decode.peer.reach import Reach, ReachState

log = structlog.get_logger()

LEAST_S = 0.5
"""A request that could wait for less says nothing of the other side."""


class Heard(Protocol):
    """What a connection knows of its other side."""

    @property
    def peer_boot(self) -> str | None:
        """None while it was never answered."""

    @property
    def heard_at(self) -> float:
        """When the last message came, by the event loop's clock."""


class ReachBook:
    """What is known of the last ``max_known`` agents that left a request without an answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, max_known: int) -> None:
        self._loop, self._max_known = loop, max_known
        self._known: OrderedDict[Hashable, Reach] = OrderedDict()

    def admit(self, who: Hashable, client: Heard | None, endpoint: str, boot: str | None) -> bool:
        """Whether it answers; False for the one fetch that may try whether it does again.

        Whatever came since, a heartbeat or the answer to a ping, makes it good; so does a ticket
        of a new process there, whose ``boot`` id is another (None: not told). Raises `RemoteError`
        (``peer_unreachable``) while it is not the time to try.
        """
        reach = self._heard(who, client)
        if reach is None:
            return True
        if boot is not None and reach.is_new(boot):
            reach = self._known[who] = Reach(boot=boot)
        wait_s = reach.admit(self._loop.time())
        if wait_s:
            raise RemoteError(
                f"the prefill agent at {endpoint} has left {reach.num_timeouts} requests in a row "
                f"without an answer; it is tried again in {wait_s:.1f} s",
                code=ErrorCode.PEER_UNREACHABLE,
                endpoint=endpoint,
                retry_after_s=round(wait_s, 3),
            )
        return reach.state is ReachState.ANSWERING

    def note_timeout(self, who: Hashable, client: Heard, asked_at: float, endpoint: str) -> None:
        """A request that was sent at ``asked_at`` has had no answer."""
        now = self._loop.time()
        if now - asked_at < LEAST_S:
            return
        self._known.setdefault(who, Reach(boot=client.peer_boot))
        self._known.move_to_end(who)
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)
        reach = self._heard(who, client)
        if reach is None:
            return
        before = reach.next_at
        reach.time_out(asked_at, now, jitter=random.random())  # noqa: S311 - no secret
        if reach.next_at != before:
            retry_s = round(reach.next_at - now, 3)
            log.warning("peer.unanswering", peer=endpoint, retry_s=retry_s)

    def retry_s(self, who: Hashable, client: Heard | None) -> float | None:
        """Seconds until one that does not answer may be tried; None while it answers."""
        reach = self._heard(who, client)
        if reach is None or reach.state is ReachState.ANSWERING:
            return None
        return max(0.0, reach.next_at - self._loop.time())

    @property
    def num_refused(self) -> int:
        """Fetches that were refused for agents that had not been heard since, by the last look."""
        return sum(reach.num_refused for reach in self._known.values())

    def known(self) -> list[Hashable]:
        """All that left a request without an answer; some of them answer again."""
        return list(self._known)

    def _heard(self, who: Hashable, client: Heard | None) -> Reach | None:
        """What is known, after what was heard: nothing by one that was never answered."""
        reach = self._known.get(who)
        if reach is not None and client is not None and client.peer_boot is not None:
            reach.hear(client.heard_at)
        return reach
