"""The sessions for engines without an event loop: the same calls, from any thread, blocking.

What an engine polls in its step loop (`take_released`, `take_fetched`) never waits.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack

import torch

from kvbus.engine.bounce.prefill import HostOffer
from kvbus.engine.decode import DecodeSession
from kvbus.engine.fetch import Fetch
from kvbus.engine.memory import MemorySession
from kvbus.engine.prefill import BlockIds, Offer, PrefillSession
from kvbus.engine.session import EngineSession, SessionOptions
from kvbus.engine.thread import SessionThread
from kvbus.errors import ClosedError
from kvbus.geometry import EngineSpec
from kvbus.protocol.engine import BlocksFreed, Fetched, Outcome, Released

S = TypeVar("S", bound=EngineSession)
X = TypeVar("X")
X_co = TypeVar("X_co", covariant=True)
T = TypeVar("T")
P = ParamSpec("P")


class InThread(Protocol[X_co]):
    """Something of a session's thread; its async calls belong there."""

    @property
    def latest(self) -> X_co:
        """It, with the latest session; raises `ClosedError` before the first."""

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """What ``call`` returns there."""


def blocking(
    method: Callable[Concatenate[X, P], Awaitable[T]],
) -> Callable[Concatenate[InThread[X], P], T]:
    """A method of `InThread.latest`, blocking."""

    @functools.wraps(method)
    def call(self: InThread[X], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(lambda: method(self.latest, *args, **kwargs))

    return call


def awaitable(method: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """A method that returns at once, as one that is awaited."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(*args, **kwargs)

    return call


class Blocking(Generic[S]):
    """A session in a thread of its own, as ``make`` makes it; open within ``with``.

    With ``reconnect`` it outlives its agent: once the agent is back, there is a new session, for
    which the engine's memory, or the engine, is registered again. Calls in between raise
    `PeerLost`. What was offered or fetched before has failed, and is taken like all that ended.
    """

    def __init__(self, make: Callable[[], S], *, reconnect: bool) -> None:
        self._make, self._reconnect = make, reconnect
        self._thread: SessionThread[S] | None = None
        self._session: S | None = None
        self._num_sessions = 0

    def __enter__(self) -> Self:
        name = f"the {type(self).__name__} session"
        self._thread = SessionThread(name, self._open, reconnect=self._reconnect)
        try:
            self._thread.wait_first()
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._thread.close()

    @property
    def session(self) -> S:
        """The latest session; raises `ClosedError` before the first."""
        if self._session is None:
            raise ClosedError("the session is not open")
        return self._session

    @property
    def latest(self) -> S:
        """The latest session, for `blocking`."""
        return self.session

    @property
    def num_reconnects(self) -> int:
        """How often there was a new session."""
        return max(0, self._num_sessions - 1)

    ready = blocking(EngineSession.ready)

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """What ``call`` returns in the session's thread, where all of its async calls belong."""
        return self.start(call).result()

    def start(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        """As `run`, without waiting."""
        if self._thread is None:
            raise ClosedError("the session is not open")
        return self._thread.start(call)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[S]:
        async with self._make() as session:
            if self._session is not None:
                await session.resume(self._session)
            self._session = session
            self._num_sessions += 1
            yield session

    def _take(self, ended: dict[str, T]) -> list[T]:
        """Empty ``ended`` while the session's thread may add to it."""
        if not ended and not self._reconnect and self.session.lost is not None:
            raise self.session.lost
        return [ended.pop(key) for key in list(ended)]


class BlockingMemory(Blocking[MemorySession]):
    """`MemorySession`, blocking. What it allocates outlives a session and ends with this."""

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        rank: int,
        *,
        reconnect: bool = False,
        **options: Unpack[SessionOptions],
    ) -> None:
        self._storages = ExitStack()
        make = partial(MemorySession, attach_path, engine, rank, storages=self._storages, **options)
        super().__init__(make, reconnect=reconnect)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._storages.close()

    allocate = blocking(MemorySession.allocate)
    allocate_ring = blocking(MemorySession.allocate_ring)
    register = blocking(MemorySession.register)

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """`MemorySession.record`, for the stream of the thread that calls it."""
        self.session.record(stream)


class BlockingPrefill(Blocking[PrefillSession]):
    """`PrefillSession`, blocking; of offers, use the methods here and not their own."""

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        reconnect: bool = False,
        **options: Unpack[SessionOptions],
    ) -> None:
        self._released: dict[str, Released] = {}

        def make() -> PrefillSession:
            return PrefillSession(attach_path, engine, on_released=self._on_released, **options)

        super().__init__(make, reconnect=reconnect)

    register = blocking(PrefillSession.register)
    offer = blocking(PrefillSession.offer)

    def extend(self, offer: Offer, num_tokens: int, block_ids: BlockIds | None = None) -> None:
        """`Offer.extend`."""
        self.run(lambda: offer.extend(num_tokens, block_ids))

    def seal(self, offer: Offer) -> None:
        """`Offer.seal`."""
        self.run(offer.seal)

    def withdraw(self, offer: Offer) -> None:
        """`Offer.withdraw`."""
        self.run(offer.withdraw)

    def wait_released(self, offer: Offer | HostOffer) -> Outcome:
        """`Offer.released`; `take_released` does not return this offer any more."""
        try:
            return self.run(offer.released)
        finally:
            self._released.pop(offer.offer_id, None)

    def take_released(self) -> list[Released]:
        """The offers that ended since the last call, by a loss with ``failed``; never waits.

        Without ``reconnect``, raises why the session was lost once nothing is left to take.
        """
        return self._take(self._released)

    def _on_released(self, released: Released) -> None:
        self._released[released.offer_id] = released


class BlockingDecode(Blocking[DecodeSession]):
    """`DecodeSession`, blocking; of fetches, use the methods here and not their own."""

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        reconnect: bool = False,
        **options: Unpack[SessionOptions],
    ) -> None:
        self._fetched: dict[str, Fetched] = {}
        self._freed: dict[str, BlocksFreed] = {}

        def make() -> DecodeSession:
            return DecodeSession(
                attach_path,
                engine,
                on_fetched=self._on_fetched,
                on_blocks_freed=self._on_blocks_freed,
                **options,
            )

        super().__init__(make, reconnect=reconnect)

    register = blocking(DecodeSession.register)
    fetch = blocking(awaitable(DecodeSession.fetch))

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
        """The fetches that ended since the last call, by a loss with stage ``lost``; never waits.

        Without ``reconnect``, raises why the session was lost once nothing is left to take.
        """
        return self._take(self._fetched)

    def take_blocks_freed(self) -> list[BlocksFreed]:
        """The fetches whose withheld blocks came back since the last call; never waits."""
        return self._take(self._freed)

    def _on_fetched(self, fetched: Fetched) -> None:
        self._fetched[fetched.fetch_id] = fetched

    def _on_blocks_freed(self, freed: BlocksFreed) -> None:
        self._freed[freed.fetch_id] = freed
