"""The thread that sends spans: once a second all that waits, and nothing faster.

While the collector is away it keeps what it has and tries again after ever longer pauses; meanwhile
the outbox fills, and drops. That it is away is said once, and once that it is back.
"""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import anyio
import structlog

from kvbus.agent.otlp.encode import encoded
from kvbus.agent.otlp.outbox import Ended, SpanOutbox
from kvbus.agent.otlp.post import Answer, Collector

log = structlog.get_logger()

PERIOD_S, MAX_PAUSE_S = 1.0, 30.0
MAX_BATCH = 256
"""Most offers or fetches in one request."""
ENDS_WITHIN_S = 2.0

InLoop = Callable[[Callable[[], None]], object]
"""Has a function called in the event loop: logs are written there."""


class SpanSender:
    """Sends what ``outbox`` has to ``collector``, as of ``resource``."""

    def __init__(
        self, outbox: SpanOutbox, collector: Collector, resource: Mapping[str, str], in_loop: InLoop
    ) -> None:
        self._outbox, self._collector, self._resource = outbox, collector, resource
        self._in_loop = in_loop
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbus-otlp", daemon=True)
        self._is_away = False

    async def run(self) -> None:
        """Send until cancelled, and then what is left, if that is quick."""
        self._thread.start()
        try:
            await anyio.sleep_forever()
        finally:
            self._ending.set()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._thread.join, ENDS_WITHIN_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ending.wait(PERIOD_S)
            settled_by = float("inf") if is_last else time.monotonic()
            while ended := self._outbox.take(MAX_BATCH, settled_by=settled_by):
                self._send(ended)

    def _send(self, ended: list[Ended]) -> None:
        """Until it is taken or refused, or this process ends."""
        try:
            body = encoded(self._resource, time.time_ns() - time.monotonic_ns(), ended)
        except Exception as error:  # a defect of ours: these are lost, the next are not
            self._drop(ended)
            self._in_loop(partial(log.error, "spans.failed", exc_info=error))
            return
        pause_s = PERIOD_S
        while True:
            is_ending = self._ending.is_set()
            timeout = {"timeout_s": ENDS_WITHIN_S} if is_ending else {}
            answer, reason = self._collector.post(body, **timeout)
            if answer is Answer.TAKEN:
                self._outbox.num_sent += len(ended)
                self._note(reason="")
                return
            self._note(reason=reason)
            if answer is Answer.REFUSED or is_ending:
                self._drop(ended)
                return
            self._ending.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _drop(self, ended: list[Ended]) -> None:
        self._outbox.num_dropped += len(ended)

    def _note(self, *, reason: str) -> None:
        """Say what has changed; nothing while it goes on."""
        if bool(reason) == self._is_away:
            return
        self._is_away, url = bool(reason), self._collector.url
        if reason:
            say = partial(log.warning, "collector.unreachable", url=url, reason=reason)
        else:
            say = partial(log.info, "collector.reached", url=url, dropped=self._outbox.num_dropped)
        self._in_loop(say)
