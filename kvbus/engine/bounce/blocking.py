"""Bounce buffers for engines without an event loop: the same calls, from any thread.

`save` and `fetch` return at once, and what ended since is a look-up. The other calls are requests
to the agent.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Self

from kvbus.engine.blocking import BlockingDecode, BlockingPrefill
from kvbus.engine.bounce.copier import Copier
from kvbus.engine.bounce.decode import HostDecode
from kvbus.engine.bounce.fetch import HostFetch
from kvbus.engine.bounce.host_pool import HostPool
from kvbus.engine.bounce.prefill import HostOffer, HostPrefill
from kvbus.engine.bounce.request_blocks import block_arrays
from kvbus.engine.bounce.sizing import PIECE_BYTES
from kvbus.engine.prefill import BlockIds
from kvbus.protocol.engine import Fetched, Outcome


class BlockingHostPrefill:
    """`HostPrefill`, blocking; of offers, use the methods here and not their own.

    `BlockingPrefill.take_released` tells of its offers, too.
    """

    def __init__(
        self,
        session: BlockingPrefill,
        pool: HostPool,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._session = session
        self._host = HostPrefill(session.session, pool, copier, piece_bytes=piece_bytes)

    def begin(
        self,
        request_id: str,
        *,
        num_tokens: int,
        first_blocks: Mapping[str, int] | None = None,
        wait_s: float = 0.0,
    ) -> HostOffer:
        """`HostPrefill.begin`."""
        self._host.session = self._session.session
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
        return self._session.start(lambda: offer.save(num_tokens, given))

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
        pool: HostPool,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
        wait_s: float = 30.0,
    ) -> None:
        self._session = session
        self._host = HostDecode(
            session.session, pool, copier, piece_bytes=piece_bytes, wait_s=wait_s
        )
        self._ended: dict[HostFetch, bool] = {}
        self._left = asyncio.Event()
        self._open: Future[None] | None = None

    def __enter__(self) -> Self:
        opened: Future[None] = Future()

        async def hold() -> None:
            """It is left in the task that entered it."""
            async with self._host:
                opened.set_result(None)
                await self._left.wait()

        self._open = self._session.start(hold)
        opened.result()
        return self

    def __exit__(self, *exc: object) -> None:
        async def leave() -> None:
            self._left.set()

        if self._open is not None:
            self._session.run(leave)
            self._open.result()

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
        """`HostDecode.fetch`; of fetches, use the methods here and not their own."""

        async def start() -> HostFetch:
            self._host.session = self._session.session
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
