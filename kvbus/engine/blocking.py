"""The sessions for engines without an event loop: the same calls, from any thread, blocking.

What an engine polls in its step loop (`take_released`, `take_fetched`) never waits.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import torch

from kvbus.engine.bounce.buffer import HostBuffer
from kvbus.engine.bounce.prefill import HostOffer
from kvbus.engine.bounce.sizing import HOST_LAYOUT
from kvbus.engine.decode import DecodeSession
from kvbus.engine.fetch import Fetch
from kvbus.engine.memory import KvCache, MemorySession, Storage, allocate_storage
from kvbus.engine.prefill import BlockIds, Offer, PrefillSession
from kvbus.engine.session import ControlSession, EngineSession, Others
from kvbus.engine.thread import SessionThread
from kvbus.errors import ClosedError
from kvbus.geometry import EngineSpec, KvLayout, RankSpec, lay_out_rank
from kvbus.protocol.engine import BlocksFreed, Fetched, Outcome, Released

S = TypeVar("S", bound=EngineSession)
C = TypeVar("C", bound=ControlSession)
T = TypeVar("T")
P = ParamSpec("P")


@overload
def blocking(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate["Blocking[S]", P], T]: ...
@overload
def blocking(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate["Blocking[S]", P], T]: ...
def blocking(
    method: Callable[Concatenate[S, P], Awaitable[T] | T],
) -> Callable[Concatenate["Blocking[S]", P], T]:
    """``method`` of a session, called in the session's thread, where all of its calls belong."""

    @functools.wraps(method)
    def call(self: "Blocking[S]", *args: P.args, **kwargs: P.kwargs) -> T:
        async def in_thread() -> T:
            result = method(self.session, *args, **kwargs)
            return await result if isawaitable(result) else result

        return self.run(in_thread)

    return cast("Callable[Concatenate[Blocking[S], P], T]", call)


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
    def num_reconnects(self) -> int:
        """How often there was a new session."""
        return max(0, self._num_sessions - 1)

    def ready(self) -> None:
        """`EngineSession.ready`."""
        self.run(self.session.ready)

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """What ``call`` returns in the session's thread, where all of its async calls belong."""
        return self._open_thread().run(call)

    def start(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        """As `run`, without waiting."""
        return self._open_thread().start(call)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[S]:
        async with self._make() as session:
            if self._session is not None:
                await self._restore(session)
            self._session = session
            self._num_sessions += 1
            yield session

    async def _restore(self, session: S) -> None:
        """Tell a new session's agent what the one before was told."""

    def _take(self, ended: dict[str, T]) -> list[T]:
        """Empty ``ended`` while the session's thread may add to it."""
        if not ended and not self._reconnect and self.session.lost is not None:
            raise self.session.lost
        return [ended.pop(key) for key in list(ended)]

    def _open_thread(self) -> SessionThread[S]:
        if self._thread is None:
            raise ClosedError("the session is not open")
        return self._thread


class BlockingMemory(Blocking[MemorySession]):
    """`MemorySession`, blocking. What it allocates outlives a session and ends with this."""

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        rank: int,
        *,
        attach_timeout_s: float = 0.0,
        reconnect: bool = False,
    ) -> None:
        self._engine, self._rank = engine, rank
        self._storages = ExitStack()
        self._register: Callable[[MemorySession], Awaitable[None]] | None = None
        super().__init__(
            partial(MemorySession, attach_path, engine, rank, attach_timeout_s=attach_timeout_s),
            reconnect=reconnect,
        )

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._storages.close()

    def allocate(
        self,
        layout: KvLayout,
        *,
        num_blocks: int | Mapping[str, int],
        device: torch.device | str = "cpu",
        direct: bool = True,
    ) -> KvCache:
        """`MemorySession.allocate`."""
        rank = lay_out_rank(self._engine, self._rank, layout, num_blocks=num_blocks)
        return KvCache(self._engine, rank, self._share(rank, device, direct=direct))

    def allocate_ring(self, num_blocks: Mapping[str, int]) -> HostBuffer:
        """`MemorySession.allocate_ring`."""
        rank = lay_out_rank(self._engine, self._rank, HOST_LAYOUT, num_blocks=num_blocks)
        return HostBuffer(self._engine, rank, self._share(rank, "cpu", direct=True))

    def register(
        self, rank: RankSpec, storages: Mapping[str, Storage], *, direct: bool = True
    ) -> None:
        """`MemorySession.register`."""

        async def register(session: MemorySession) -> None:
            await session.register(rank, storages, direct=direct)

        self.run(lambda: register(self.session))
        self._register = register

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """`MemorySession.record`, for the stream of the thread that calls it."""
        self.session.record(stream)

    def _share(self, rank: RankSpec, device: torch.device | str, *, direct: bool) -> torch.Tensor:
        storage = allocate_storage(self._engine, rank, device)
        self._storages.callback(storage.close)
        self.register(rank, {rank.segments[0].segment_id: storage}, direct=direct)
        return storage.tensor

    async def _restore(self, session: MemorySession) -> None:
        if self._register is not None:
            await self._register(session)


class BlockingControl(Blocking[C]):
    """A control session, blocking; see `PrefillSession` and `DecodeSession`."""

    _kind: Callable[..., C]
    _others: Others | None = None

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        attach_timeout_s: float = 0.0,
        reconnect: bool = False,
    ) -> None:
        make = partial(self._kind, attach_path, engine, attach_timeout_s=attach_timeout_s)
        super().__init__(partial(make, **self._callbacks()), reconnect=reconnect)

    def register(self, *, others: Others = ()) -> None:
        """`ControlSession.register`."""
        self.run(lambda: self.session.register(others=others))
        self._others = others

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        raise NotImplementedError

    async def _restore(self, session: C) -> None:
        if self._others is not None:
            await session.register(others=self._others)
            await session.ready()


class BlockingPrefill(BlockingControl[PrefillSession]):
    """`PrefillSession`, blocking; of offers, use the methods here and not their own."""

    _kind = PrefillSession
    offer = blocking(PrefillSession.offer)

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        self._released: dict[str, Released] = {}
        return {"on_released": lambda one: self._released.update({one.offer_id: one})}

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


class BlockingDecode(BlockingControl[DecodeSession]):
    """`DecodeSession`, blocking; of fetches, use the methods here and not their own."""

    _kind = DecodeSession
    fetch = blocking(DecodeSession.fetch)

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        self._fetched: dict[str, Fetched] = {}
        self._freed: dict[str, BlocksFreed] = {}
        return {
            "on_fetched": lambda one: self._fetched.update({one.fetch_id: one}),
            "on_blocks_freed": lambda one: self._freed.update({one.fetch_id: one}),
        }

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
