"""Host staging for engines without an event loop: the same calls, from any thread.

Refuses to make a step of the engine wait for bytes: `save` and `fetch` return at once, and what
ended since is a look-up. The other calls are requests to the agent.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from kvbus.engine.blocking import BlockingDecode, BlockingPrefill
from kvbus.engine.bounce.copier import Copier
from kvbus.engine.bounce.decode import HostDecode
from kvbus.engine.bounce.fetch import HostFetch
from kvbus.engine.bounce.prefill import HostOffer, HostPrefill
from kvbus.engine.bounce.request_blocks import block_arrays
from kvbus.engine.bounce.ring import HostRing
from kvbus.engine.bounce.sizing import PIECE_BYTES
from kvbus.engine.decode import BlockIds
from kvbus.protocol.engine import Fetched, Outcome


class BlockingHostPrefill:
    """`HostPrefill`, blocking; `BlockingPrefill.take_released` tells of its offers, too."""

    def __init__(
        self,
        session: BlockingPrefill,
        ring: HostRing,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._session = session
        self._host = HostPrefill(session.session, ring, copier, piece_bytes=piece_bytes)

    def begin(
        self,
        request_id: str,
        *,
        num_tokens: int,
        first_blocks: Mapping[str, int] | None = None,
        wait_s: float = 0.0,
    ) -> HostOffer:
        """`HostPrefill.begin`; use the other methods here, not those of the offer."""
        return self._session.run(
            lambda: self._host.begin(
                request_id, num_tokens=num_tokens, first_blocks=first_blocks, wait_s=wait_s
            )
        )

    def save(self, offer: HostOffer, num_tokens: int, block_ids: BlockIds) -> Future[None]:
        """Start `HostOffer.save`; keep the blocks until the future is done.

        It cannot be cancelled; `abort` ends it. Saves of one offer follow each other in the order
        of the calls.
        """
        given = block_arrays(block_ids)
        saved: Future[None] = Future()
        saved.set_running_or_notify_cancel()

        def settle(started: Future[None]) -> None:
            error = started.exception()
            if error is not None:
                saved.set_exception(error)
            else:
                saved.set_result(None)

        self._session.start(lambda: offer.save(num_tokens, given)).add_done_callback(settle)
        return saved

    def offer(self, offer: HostOffer, *, ttl_s: float | None = None) -> dict[str, Any]:
        """`HostOffer.offer`."""
        return self._session.run(lambda: offer.offer(ttl_s=ttl_s))

    def seal(self, offer: HostOffer) -> None:
        """`HostOffer.seal`."""
        self._session.run(offer.seal)

    def abort(self, offer: HostOffer) -> None:
        """`HostOffer.abort`."""
        self._session.run(offer.abort)

    def wait_released(self, offer: HostOffer) -> Outcome:
        """`HostOffer.released`; `take_released` does not return this offer any more."""
        return self._session.wait_released(offer)


class BlockingHostDecode:
    """`HostDecode`, blocking; open within ``with``, inside of that of the session."""

    def __init__(
        self,
        session: BlockingDecode,
        ring: HostRing,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
        wait_s: float = 30.0,
    ) -> None:
        self._session = session
        self._host = HostDecode(
            session.session, ring, copier, piece_bytes=piece_bytes, wait_s=wait_s
        )
        self._ended: dict[HostFetch, bool] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._session.opened(self._host))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int,
        block_ids: BlockIds,
        first_token: int = 0,
        timeout_s: float | None = None,
        zero_tail: bool = False,
    ) -> HostFetch:
        """`HostDecode.fetch`; use the other methods here, not those of the fetch."""

        async def start() -> HostFetch:
            fetch = self._host.fetch(
                ticket,
                num_tokens=num_tokens,
                block_ids=block_ids,
                first_token=first_token,
                timeout_s=timeout_s,
                zero_tail=zero_tail,
            )
            fetch.when_ended(lambda: self._ended.update({fetch: True}))
            return fetch

        return self._session.run(start)

    def cancel(self, fetch: HostFetch) -> None:
        """`HostFetch.cancel`."""
        self._session.run(fetch.cancel)

    def wait_completed(self, fetch: HostFetch) -> Fetched:
        """`HostFetch.completed`; `take_ended` does not return this fetch any more."""
        try:
            return self._session.run(fetch.completed)
        finally:
            self._ended.pop(fetch, None)

    def take_ended(self) -> list[HostFetch]:
        """The fetches that ended since the last call; never waits.

        `wait_completed` says how each did, and does not wait for these.
        """
        return [fetch for fetch in list(self._ended) if self._ended.pop(fetch, False)]
