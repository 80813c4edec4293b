"""The sessions for engines without an event loop: the same calls, from any thread, blocking.

What an engine polls in its step loop (`take_released`, `take_ended`) never waits.
"""

import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack

import torch

from kvbus.engine.bounce.prefill import HostOffer
from kvbus.engine.decode import DecodeSession
from kvbus.engine.fetch import Fetch
from kvbus.engine.kept import OpenSession
from kvbus.engine.memory import MemorySession
from kvbus.engine.prefill import Offer, PrefillSession
from kvbus.engine.session import EngineSession, SessionOptions
from kvbus.engine.thread import SessionThread
from kvbus.errors import ClosedError
from kvbus.geometry import EngineSpec
from kvbus.protocol.engine import BlocksFreed, Fetched, Outcome, Released
from kvbus.protocol.message import Message

S = TypeVar("S", bound=EngineSession)
X = TypeVar("X")
X_co = TypeVar("X_co", covariant=True)
T = TypeVar("T")
K = TypeVar("K")
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


def asked_here(method: Callable[P, T]) -> Callable[P, T]:
    """A method that says when it was called, in this thread."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        kwargs.setdefault("asked_s", time.monotonic())
        return method(*args, **kwargs)

    return call


def given(
    method: Callable[Concatenate[X, P], Awaitable[T]],
) -> Callable[Concatenate[InThread[Any], X, P], T]:
    """A method of what is given as the first argument, blocking."""

    def call(self: InThread[Any], of: X, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(lambda: method(of, *args, **kwargs))

    call.__doc__ = f"`{method.__qualname__}`."
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

    def __init__(self, make: OpenSession[S], *, reconnect: bool) -> None:
        self._make, self._reconnect = make, reconnect
        self._thread: SessionThread[S] | None = None

    def __enter__(self) -> Self:
        name = f"the {type(self).__name__} session"
        self._thread = SessionThread(name, self._make, reconnect=self._reconnect)
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
        if self._thread is None:
            raise ClosedError("the session is not open")
        return self._thread.latest

    latest = session  # for `blocking`

    @property
    def num_reconnects(self) -> int:
        """How often there was a new session after the first."""
        return max(0, self._thread.num_opened - 1) if self._thread is not None else 0

    ready = blocking(EngineSession.ready)

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """What ``call`` returns in the session's thread, where all of its async calls belong."""
        return self.start(call).result()

    def start(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        """As `run`, without waiting."""
        if self._thread is None:
            raise ClosedError("the session is not open")
        return self._thread.start(call)

    def _take(self, ended: dict[K, T]) -> list[T]:
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
        access: str | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        self._storages = ExitStack()
        kept = partial(MemorySession, storages=self._storages, access=access)
        make = partial(kept, attach_path, engine, rank, **options)
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
        make = partial(
            PrefillSession,
            attach_path,
            engine,
            on_released=lambda released: self._released.update({released.offer_id: released}),
            **options,
        )
        super().__init__(make, reconnect=reconnect)

    register = blocking(PrefillSession.register)
    offer = blocking(PrefillSession.offer)
    extend = given(Offer.extend)
    seal = given(Offer.seal)
    withdraw = given(Offer.withdraw)

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
        self._ended: dict[tuple[type[Message], str], Fetched | BlocksFreed] = {}
        make = partial(
            DecodeSession,
            attach_path,
            engine,
            on_fetched=self._note,
            on_blocks_freed=self._note,
            **options,
        )
        super().__init__(make, reconnect=reconnect)

    register = blocking(DecodeSession.register)
    fetch = asked_here(blocking(awaitable(DecodeSession.fetch)))
    cancel = given(Fetch.cancel)

    def wait_completed(self, fetch: Fetch) -> Fetched:
        """`Fetch.completed`; `take_ended` does not return its `Fetched` any more."""
        try:
            return self.run(fetch.completed)
        finally:
            self._ended.pop((Fetched, fetch.fetch_id), None)

    def wait_blocks_freed(self, fetch: Fetch) -> None:
        """`Fetch.blocks_freed`; `take_ended` does not return its `BlocksFreed` any more."""
        self.run(fetch.blocks_freed)
        self._ended.pop((BlocksFreed, fetch.fetch_id), None)

    def take_ended(self) -> list[Fetched | BlocksFreed]:
        """What ended since the last call, in that order; never waits.

        A `Fetched` for each fetch, with stage ``lost`` after a loss, and ``silent`` when its agent
        answers nothing; and behind it a `BlocksFreed`, once, if its blocks were not free by then.
        Without ``reconnect``, raises why the session was lost once nothing is left to take.
        """
        return self._take(self._ended)

    def _note(self, ended: Fetched | BlocksFreed) -> None:
        self._ended[type(ended), ended.fetch_id] = ended
