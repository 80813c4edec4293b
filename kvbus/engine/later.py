"""What comes later, for threads and event loops alike, and the loop in which it is worked for."""

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


class Later(Generic[T]):
    """Something that happens once: a result, or an error.

    In a thread `wait` for it, in any event loop ``await`` it, or have a call made. Who waits no
    more does not undo it. Once it has happened it lets go of the calls: who is called mostly has
    this, and such a cycle would be left to the engine's garbage collector.

    ``runner`` makes it happen: a wait in its event loop would never end, and raises `LocalError`.
    """

    __slots__ = ("_calls", "_error", "_lock", "_runner", "_value", "is_observed")

    def __init__(self, runner: "Runner | None" = None) -> None:
        self.is_observed = False
        """Whether the engine waits for it, or has a callback: then `Link.ended` leaves it out."""
        self._runner = runner
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] | None = []
        """To be made when it happens; None since then."""
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has happened."""
        return self._calls is None

    def result(self, timeout_s: float | None = None) -> T:
        """As `wait`, for the SDK itself."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error.with_traceback(None)  # many may share it, and raise it often
        value: T = self._value
        return value

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Its error, None with a result; waits as `wait` does."""
        if not self.done():
            if self._runner is not None and timeout_s != 0:
                self._runner.check_may_wait()
            happened = threading.Event()
            self.then(happened.set)
            if not happened.wait(timeout_s):
                with self._lock:
                    if self._calls is not None:
                        self._calls.remove(happened.set)
                raise TimeoutError
        return self._error

    def wait(self, timeout_s: float | None = None) -> T:
        """The result; raises the error, and `TimeoutError` after ``timeout_s``.

        In an event loop, ``await`` it instead: this blocks its thread. Raises `LocalError` in the
        event loop of the link, where it would block for ever.
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
        """Have ``call`` called once it has happened, in the thread where it does.

        At once, if it has. It must not wait. What it raises is logged.
        """
        self.is_observed = True
        self.then(call)

    def then(self, call: Callable[[], object]) -> None:
        """As `add_callback`, for the SDK itself: it is not told that somebody observes this."""
        with self._lock:
            if self._calls is not None:
                self._calls.append(call)
                return
        _make(call)

    def settle(self, outcome: T | BaseException) -> None:
        """It has happened; the first outcome counts."""
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
    except Exception:  # the others are made all the same
        log.exception("kvbus: a callback failed")


class Handle:
    """Something that ends, and whose blocks are free then or later."""

    ended: Later[Any]
    freed: Later[None] | None = None
    """None when the blocks are free with the end."""
    awaits_report: bool | None = None
    """None before the first report, True when another one follows, False after the last."""

    @property
    def is_observed(self) -> bool:
        """Whether the engine learns of its next state without a report."""
        if self.freed is not None and self.awaits_report:
            return self.freed.is_observed
        return self.ended.is_observed


H = TypeVar("H", bound=Handle)


# Each state is reported once. The lock orders a report and the end of the blocks' use:
#
#     link's thread   settle `ended`  note           settle `freed`  note
#     engine's thread                      take ①                         take ②
#
# ① finds `freed` unsettled, and sets `awaits_report`: the second `note` adds the handle again. A ①
# behind `settle` reports both states at once, and then the second `note` adds nothing.
class Ended(Generic[H]):
    """Queue of the handles that ended and that the engine does not observe.

    Before the first `take` it keeps no handle alive: an engine that polls its handles never calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over: MutableMapping[H, None] = WeakKeyDictionary()

    def note(self, handle: H) -> None:
        """Add ``handle``, which has ended, or whose blocks are free now."""
        with self._lock:
            if handle.awaits_report is not False and not handle.is_observed:
                self._over[handle] = None

    def take(self) -> list[H]:
        """Return the handles that were added since the last call."""
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
        with suppress(RuntimeError):  # the loop is closed, and nobody waits in it
            loop.call_soon_threadsafe(settle)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of this thread; None when there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Runner:
    """Runs calls in one event loop, from any thread, and those of one thread in their order."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock, self._is_closed = threading.Lock(), False
        self._tasks: dict[asyncio.Task[None], anyio.CancelScope] = {}

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run in ``loop`` from now on."""
        self._loop = loop

    def post(self, call: Callable[[], object]) -> None:
        """Call ``call`` in the loop: at once from its own thread, and never waiting from others.

        Raises `ClosedError` before there is a loop, and after. An error of ``call`` is logged.
        """
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
        """Raise `LocalError` in the loop, which would wait for itself."""
        if self._loop is not None and running_loop() is self._loop:
            raise LocalError(
                "cannot wait here: this event loop runs the link and would block itself; use "
                "'await' (before 'offer.ticket': 'await offer')"
            )

    def start(self, call: Callable[[], Awaitable[T]]) -> Later[T]:
        """Begin ``call`` in the loop; what it returns or raises comes later."""
        later: Later[T] = Later(self)
        self.post(partial(self._start, call, later))
        return later

    def _start(self, call: Callable[[], Awaitable[T]], later: Later[T]) -> None:
        asyncio.get_running_loop().create_task(self._run(call, later))

    async def aclose(self) -> None:
        """From the loop: cancel what was started; nothing is posted any more. Idempotent.

        By scopes, as a cancelled task does not wait for what is shielded in it.
        """
        with self._lock:
            self._is_closed = True
        for _ in range(2):  # what was posted by now is called, and its tasks begin
            await asyncio.sleep(0)
        tasks = dict(self._tasks)
        for scope in tasks.values():
            scope.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, call: Callable[[], Awaitable[T]], later: Later[T]) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            # Made in the task: where an engine's environment has sniffio, anyio asks it for the
            # event loop, and it knows of none in a callback.
            with anyio.CancelScope() as scope:
                self._tasks[task] = scope
                later.settle(await call())
        except Exception as error:
            later.settle(error)
        finally:
            later.settle(ClosedError("the link was closed"))
            self._tasks.pop(task, None)
