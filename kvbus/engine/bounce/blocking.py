"""Bounce buffers for engines without an event loop: the same calls, from any thread.

`save` and `fetch` return at once, and what ended since is a look-up. The other calls are requests
to the agent.
"""

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Self

from kvbus.engine.blocking import BlockingDecode, BlockingPrefill, awaitable, blocking, given
from kvbus.engine.bounce.buffer import Copier
from kvbus.engine.bounce.decode import HostDecode, HostFetch
from kvbus.engine.bounce.host_pool import HostPool
from kvbus.engine.bounce.prefill import HostOffer, HostPrefill
from kvbus.engine.bounce.request_blocks import block_tables
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
        self._session, self.run = session, session.run
        self._host = HostPrefill(session.session, pool, copier, piece_bytes=piece_bytes)

    @property
    def latest(self) -> HostPrefill:
        """With the latest session, for `blocking`."""
        self._host.session = self._session.session
        return self._host

    begin = blocking(HostPrefill.begin)
    offer = given(HostOffer.offer)
    seal = given(HostOffer.seal)
    abort = given(HostOffer.abort)

    def wait_released(self, offer: HostOffer) -> Outcome:
        """`HostOffer.released`; `take_released` does not return this offer any more."""
        return self._session.wait_released(offer)

    def save(self, offer: HostOffer, num_tokens: int, block_ids: BlockIds) -> Future[None]:
        """Start `HostOffer.save`; keep the blocks until the future is done.

        It cannot be cancelled; `abort` ends it. Saves of one offer follow each other in the order
        of the calls.
        """
        copied = {name: table.array() for name, table in block_tables(block_ids).items()}

        def save() -> Awaitable[None]:
            self._host.session = self._session.session
            return offer.save(num_tokens, copied)

        return self._session.start(save)


class BlockingHostDecode:
    """`HostDecode`, blocking; open within ``with``, inside of that of the session.

    Of fetches, use the methods here and not their own.
    """

    def __init__(
        self,
        session: BlockingDecode,
        pool: HostPool,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
        wait_s: float = 30.0,
    ) -> None:
        self._ended: dict[HostFetch, bool] = {}
        self._session, self.run = session, session.run
        self._host = HostDecode(
            session.session,
            pool,
            copier,
            piece_bytes=piece_bytes,
            wait_s=wait_s,
            on_ended=lambda fetch: self._ended.update({fetch: True}),
        )
        self._left = asyncio.Event()
        self._open: Future[None] | None = None

    @property
    def latest(self) -> HostDecode:
        """With the latest session, for `blocking`."""
        self._host.session = self._session.session
        return self._host

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
        if self._open is not None:
            self.run(awaitable(self._left.set))
            self._open.result()

    fetch = blocking(awaitable(HostDecode.fetch))
    cancel = given(HostFetch.cancel)

    def wait_completed(self, fetch: HostFetch) -> Fetched:
        """`HostFetch.completed`; `take_ended` does not return this fetch any more."""
        try:
            return self.run(fetch.completed)
        finally:
            self._ended.pop(fetch, None)

    def take_ended(self) -> list[HostFetch]:
        """The fetches that ended since the last call; never waits.

        `wait_completed` says how each did, and does not wait for these.
        """
        return [fetch for fetch in list(self._ended) if self._ended.pop(fetch, False)]
