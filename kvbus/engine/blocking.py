"""The sessions for engines without an event loop: the same calls, from any thread, blocking.

Refuses a second implementation: an event loop runs in a thread of its own, and every call is the
async one. What an engine polls in its step loop (`take_released`, `take_fetched`) is a
look-up that never waits.
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from kvbus.engine.bounce.buffer import HostBuffer
from kvbus.engine.decode import BlockIds, DecodeSession
from kvbus.engine.fetch import Fetch
from kvbus.engine.memory import KvCache, MemorySession
from kvbus.engine.prefill import Offer, PrefillSession
from kvbus.engine.session import EngineSession, Others
from kvbus.errors import ClosedError
from kvbus.geometry import EngineSpec, KvLayout, RankSpec
from kvbus.memory.cuda import CudaStorage
from kvbus.memory.storage import SharedStorage
from kvbus.protocol.engine import BlocksFreed, Fetched, Outcome, Released

S = TypeVar("S", bound=EngineSession)
T = TypeVar("T")


class Releasable(Protocol):
    """An `Offer`, or what has one."""

    @property
    def offer_id(self) -> str: ...

    async def released(self) -> Outcome: ...


class Blocking(Generic[S]):
    """A session and the thread that its event loop runs in; open within ``with``."""

    def __init__(self, session: S) -> None:
        self.session = session
        self._stack = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self.session))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def ready(self) -> None:
        """`EngineSession.ready`."""
        self.run(self.session.ready)

    def _take(self, ended: dict[str, T]) -> list[T]:
        """Empty ``ended`` while the session's thread may add to it."""
        if not ended and self.session.lost is not None:
            raise self.session.lost
        return [ended.pop(key) for key in list(ended)]

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """What ``call`` returns in the session's thread, where all of its async calls belong."""
        return self._open_portal().call(call)

    def start(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        """As `run`, without waiting."""
        return self._open_portal().start_task_soon(call)

    def opened(self, part: AbstractAsyncContextManager[T]) -> AbstractContextManager[T]:
        """``part`` of the session, entered and left in the session's thread."""
        return self._open_portal().wrap_async_context_manager(part)

    def _open_portal(self) -> BlockingPortal:
        if self._portal is None:
            raise ClosedError("the session is not open")
        return self._portal


class BlockingMemory(Blocking[MemorySession]):
    """`MemorySession`, blocking."""

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        rank: int,
        *,
        attach_timeout_s: float = 0.0,
    ) -> None:
        super().__init__(
            MemorySession(attach_path, engine, rank, attach_timeout_s=attach_timeout_s)
        )

    def allocate(
        self,
        layout: KvLayout,
        *,
        num_blocks: int | Mapping[str, int],
        device: torch.device | str = "cpu",
        direct: bool = True,
    ) -> KvCache:
        """`MemorySession.allocate`."""
        return self.run(
            lambda: self.session.allocate(
                layout, num_blocks=num_blocks, device=device, direct=direct
            )
        )

    def allocate_ring(self, num_blocks: Mapping[str, int]) -> HostBuffer:
        """`MemorySession.allocate_ring`."""
        return self.run(lambda: self.session.allocate_ring(num_blocks))

    def register(
        self,
        rank: RankSpec,
        storages: Mapping[str, SharedStorage | CudaStorage],
        *,
        direct: bool = True,
    ) -> None:
        """`MemorySession.register`."""
        self.run(lambda: self.session.register(rank, storages, direct=direct))

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """`MemorySession.record`, for the stream of the thread that calls it."""
        self.session.record(stream)


class BlockingPrefill(Blocking[PrefillSession]):
    """`PrefillSession`, blocking."""

    def __init__(
        self, attach_path: str | Path, engine: EngineSpec, *, attach_timeout_s: float = 0.0
    ) -> None:
        self._released: dict[str, Released] = {}
        super().__init__(
            PrefillSession(
                attach_path,
                engine,
                attach_timeout_s=attach_timeout_s,
                on_released=self._on_released,
            )
        )

    def _on_released(self, released: Released) -> None:
        self._released[released.offer_id] = released

    def register(self, *, others: Others = ()) -> None:
        """`PrefillSession.register`."""
        self.run(lambda: self.session.register(others=others))

    def offer(
        self,
        request_id: str,
        *,
        num_tokens: int,
        block_ids: BlockIds,
        sealed: bool = True,
        ttl_s: float | None = None,
        first_blocks: Mapping[str, int] | None = None,
    ) -> Offer:
        """`PrefillSession.offer`; use the other methods here, not those of the offer."""
        return self.run(
            lambda: self.session.offer(
                request_id,
                num_tokens=num_tokens,
                block_ids=block_ids,
                sealed=sealed,
                ttl_s=ttl_s,
                first_blocks=first_blocks,
            )
        )

    def extend(self, offer: Offer, num_tokens: int, block_ids: BlockIds | None = None) -> None:
        """`Offer.extend`."""
        self.run(lambda: offer.extend(num_tokens, block_ids))

    def seal(self, offer: Offer) -> None:
        """`Offer.seal`."""
        self.run(offer.seal)

    def withdraw(self, offer: Offer) -> None:
        """`Offer.withdraw`."""
        self.run(offer.withdraw)

    def wait_released(self, offer: Releasable) -> Outcome:
        """`Offer.released`; `take_released` does not return this offer any more."""
        outcome = self.run(offer.released)
        self._released.pop(offer.offer_id, None)
        return outcome

    def take_released(self) -> list[Released]:
        """The offers that ended since the last call; never waits.

        Raises why the session was lost, once nothing is left to take.
        """
        return self._take(self._released)


class BlockingDecode(Blocking[DecodeSession]):
    """`DecodeSession`, blocking."""

    def __init__(
        self, attach_path: str | Path, engine: EngineSpec, *, attach_timeout_s: float = 0.0
    ) -> None:
        self._fetched: dict[str, Fetched] = {}
        self._freed: dict[str, BlocksFreed] = {}
        super().__init__(
            DecodeSession(
                attach_path,
                engine,
                attach_timeout_s=attach_timeout_s,
                on_fetched=self._on_fetched,
                on_blocks_freed=self._on_blocks_freed,
            )
        )

    def _on_fetched(self, fetched: Fetched) -> None:
        self._fetched[fetched.fetch_id] = fetched

    def _on_blocks_freed(self, freed: BlocksFreed) -> None:
        self._freed[freed.fetch_id] = freed

    def register(self, *, others: Others = ()) -> None:
        """`DecodeSession.register`."""
        self.run(lambda: self.session.register(others=others))

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int,
        block_ids: BlockIds,
        first_token: int = 0,
        timeout_s: float | None = None,
        zero_tail: bool = False,
    ) -> Fetch:
        """`DecodeSession.fetch`; use the other methods here, not those of the fetch."""

        async def start() -> Fetch:
            return self.session.fetch(
                ticket,
                num_tokens=num_tokens,
                block_ids=block_ids,
                first_token=first_token,
                timeout_s=timeout_s,
                zero_tail=zero_tail,
            )

        return self.run(start)

    def cancel(self, fetch: Fetch) -> None:
        """`Fetch.cancel`."""
        self.run(fetch.cancel)

    def wait_completed(self, fetch: Fetch) -> Fetched:
        """`Fetch.completed`; `take_fetched` does not return this fetch any more."""
        try:
            return self.run(fetch.completed)
        finally:
            self._fetched.pop(fetch.fetch_id, None)

    def wait_blocks_freed(self, fetch: Fetch) -> None:
        """`Fetch.blocks_freed`; `take_blocks_freed` does not return this fetch any more."""
        self.run(fetch.blocks_freed)
        self._freed.pop(fetch.fetch_id, None)

    def take_fetched(self) -> list[Fetched]:
        """The fetches that ended since the last call; never waits.

        Raises why the session was lost, once nothing is left to take; `wait_blocks_freed` then
        tells of each other fetch whether its blocks may be used again.
        """
        return self._take(self._fetched)

    def take_blocks_freed(self) -> list[BlocksFreed]:
        """The fetches whose withheld blocks came back since the last call; never waits."""
        return self._take(self._freed)
