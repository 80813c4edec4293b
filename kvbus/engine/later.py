"""Results for threads and event loops, and their loop."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import anyio

from kvbus.errors import ClosedError, LocalError

T = TypeVar("T")

log = logging.getLogger("kvbus.engine")


class Completion(Generic[T]):
    """A result or an error that arrives once: `wait` in a thread, ``await`` in any event loop.

    A waiter that times out or is cancelled does not cancel the operation.
    """

    __slots__ = ("_calls", "_error", "_lock", "_runner", "_value", "is_observed")

    def __init__(self, runner: "Runner | None" = None) -> None:
        self.is_observed = False
        """Whether the engine waits for it or has a callback; `Link.ended` leaves it out."""
        self._runner = runner
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] | None = []
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._calls is None

    def result(self, timeout_s: float | None = None) -> T:
        """Wait as `wait` does, without setting `is_observed`."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error.with_traceback(None)  # many may share it, and raise it often
        value: T = self._value
        return value

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait, and return the error, or None for a result; do not set `is_observed`."""
        if not self.done():
            if self._runner is not None and timeout_s != 0:
                self._runner.check_may_wait()
            settled = threading.Event()
            self.then(settled.set)
            if not settled.wait(timeout_s):
                with self._lock:
                    if self._calls is not None:
                        self._calls.remove(settled.set)
                raise TimeoutError
        return self._error

    def wait(self, timeout_s: float | None = None) -> T:
        """Block for the result; raise its error, or `TimeoutError` after ``timeout_s``.

        Raises `LocalError` in the link's event loop, which it would block forever.
        """
        self.is_observed = True
        return self.result(timeout_s)

    def __await__(self) -> Generator[Any, None, T]:
        self.is_observed = True
        if not self.done():
            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()
            self.then(partial(_wake, loop, woken))
            yield from woken
        return self.result()

    def add_callback(self, call: Callable[[], object]) -> None:
        """Run ``call`` in the link's thread or loop, or now if done; it must not block."""
        self.is_observed = True
        self.then(call)

    def then(self, call: Callable[[], object]) -> None:
        """Add a callback without setting `is_observed`."""
        with self._lock:
            if self._calls is not None:
                self._calls.append(call)
                return
        _make(call)

    def settle(self, outcome: T | BaseException) -> None:
        with self._lock:
            if self._calls is None:
                return
            if isinstance(outcome, BaseException):
                self._error = outcome
            else:
                self._value = outcome
            calls, self._calls = self._calls, None
        for call in calls:
            _make(call)


def _make(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # the other callbacks run all the same
        log.exception("kvbus: a callback failed")


class Handle:
    ended: Completion[Any]
    freed: Completion[None] | None = None
    """None when the blocks are free at the end."""
    awaits_report: bool | None = None
    """None before the first report, True when another follows, False after the last."""

    @property
    def is_observed(self) -> bool:
        if self.freed is not None and self.awaits_report:
            return self.freed.is_observed
        return self.ended.is_observed


H = TypeVar("H", bound=Handle)


# Each state is reported once. The lock orders a report and the release of the blocks:
#
#     link's thread   settle `ended`  note           settle `freed`  note
#     engine's thread                      take ①                         take ②
#
# ① finds `freed` unsettled and sets `awaits_report`: the second `note` adds the handle again. If ①
# comes after the second `settle`, it reports both states, and the second `note` adds nothing.
class EndedQueue(Generic[H]):
    """Ended handles that the engine does not observe; weak references before the first `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over: MutableMapping[H, None] = WeakKeyDictionary()

    def note(self, handle: H) -> None:
        with self._lock:
            if handle.awaits_report is not False and not handle.is_observed:
                self._over[handle] = None

    def take(self) -> list[H]:
        with self._lock:
            over, self._over = self._over, {}
            news = [one for one in over if not one.is_observed]
            for one in news:
                one.awaits_report = one.freed is not None and not one.freed.done()
            return news


def _wake(loop: asyncio.AbstractEventLoop, woken: "asyncio.Future[None]") -> None:
    def settle() -> None:
        if not woken.done():
            woken.set_result(None)

    if running_loop() is loop:
        settle()
    else:
        with suppress(RuntimeError):  # the loop is closed: no task waits in it
            loop.call_soon_threadsafe(settle)


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Runner:
    """An event loop for calls from any thread; those of one thread keep their order."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock, self._is_closed = threading.Lock(), False
        self._tasks: dict[asyncio.Task[None], anyio.CancelScope] = {}

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def post(self, call: Callable[[], object]) -> None:
        """Run ``call`` now in the loop's thread, later from others. Raises `ClosedError`."""
        if self._loop is None:
            raise ClosedError("the link is not open")
        if running_loop() is self._loop and not self._is_closed:
            call()
            return
        with self._lock:
            if self._is_closed:
                raise ClosedError("the link is closed")
            self._loop.call_soon_threadsafe(call)

    def check_may_wait(self) -> None:
        if self._loop is not None and running_loop() is self._loop:
            raise LocalError(
                "cannot wait here: this event loop runs the link and would block itself; use "
                "'await' (before 'offer.ticket': 'await offer')"
            )

    def start(self, call: Callable[[], Awaitable[T]]) -> Completion[T]:
        later: Completion[T] = Completion(self)
        self.post(partial(self._start, call, later))
        return later

    def _start(self, call: Callable[[], Awaitable[T]], later: Completion[T]) -> None:
        asyncio.get_running_loop().create_task(self._run(call, later))

    async def aclose(self) -> None:
        """Cancel scopes, as a cancelled task does not wait for its shielded parts."""
        with self._lock:
            self._is_closed = True
        for _ in range(2):  # queued calls run, and their tasks start
            await asyncio.sleep(0)
        tasks = dict(self._tasks)
        for scope in tasks.values():
            scope.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, call: Callable[[], Awaitable[T]], later: Completion[T]) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            # Create the scope in the task: where sniffio is installed, anyio gets the event loop
            # from it, which fails in a callback.
            with anyio.CancelScope() as scope:
                self._tasks[task] = scope
                later.settle(await call())
        except Exception as error:
            later.settle(error)
        finally:
            later.settle(ClosedError("the link was closed"))
            self._tasks.pop(task, None)
