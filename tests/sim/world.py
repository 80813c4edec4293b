"""Virtual time: event loops that one thread steps in the order of their next events."""

import asyncio
import gc
import heapq
import itertools
import random
import selectors
import traceback
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

from anyio._backends._asyncio import CancelScope

T = TypeVar("T")

_PAST_S = 1e-8
"""A timer runs so long after its time, so that the process's own clock has reached it."""
_MOST_TURNS, _TURNS_S = 100, 100e-6
"""An event loop takes no time, but for so many turns without a pause. anyio turns while a cancelled
scope waits for a shielded one.
"""
_SPINS_S = 2.0
"""An event loop that turns for so long without a pause never rests."""
_STEPS_OF_A_COLLECTION = 500
"""Mapped memory goes when nothing refers to it, so garbage is collected by steps."""


class Violation(AssertionError):
    """Something that must not happen."""


class Luck(random.Random):
    """All random draws of a world, from one seed."""

    def chance(self, share: float) -> bool:
        return share > 0 and self.random() < share

    def delay_s(self, mean_s: float) -> float:
        """Around the mean, seldom many times as long."""
        return self.expovariate(1 / mean_s)


class _NoSelector(selectors.SelectSelector):
    """A selector that never waits for the kernel."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class _SimTask(asyncio.Task[Any]):
    """A task whose place in a set follows from the seed, not from its address."""

    def __init__(self, number: int, coro: Any, **more: Any) -> None:
        self._number = number
        super().__init__(coro, **more)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.SelectorEventLoop):
    """The event loop of one simulated process; its clock has an offset and a rate of its own.

    It is asyncio's own, stepped from outside, which needs some of its private attributes.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[Any]
    _run_once: Callable[[], None]
    _timer_cancelled_count: int

    def __init__(self, world: "World", name: str, *, offset_s: float, rate: float) -> None:
        self.world, self.name = world, name
        self._offset_s, self._rate = offset_s, rate
        self._readers: dict[int, Callable[[], object]] = {}
        self.is_frozen = self.is_dead = False
        self.busy_since: float | None = None
        super().__init__(_NoSelector())
        self._clock_resolution = 0.0
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._see_failure)

    def time(self) -> float:
        return self.world.now * self._rate + self._offset_s

    def next_at(self) -> float | None:
        """When it has something to do, in the world's time; None when it only waits."""
        if self._ready:
            return self.world.now
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        if not scheduled:
            return None
        at: float = (scheduled[0]._when - self._offset_s) / self._rate + _PAST_S
        return max(self.world.now, at)

    @property
    def has_more(self) -> bool:
        return bool(self._ready)

    def _new_task(self, loop: Any, coro: Any, **more: Any) -> _SimTask:
        return _SimTask(self.world.new_number(), coro, loop=self, **more)

    def step(self) -> None:
        events._set_running_loop(self)
        try:
            self._run_once()
        finally:
            events._set_running_loop(None)

    def add_reader(  # type: ignore[override]  # callers give no arguments
        self, fd: Any, callback: Callable[[], object]
    ) -> None:
        self._readers[fd] = callback

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def signal(self, fd: int) -> None:
        if fd in self._readers:
            self.call_soon(self._read, fd)

    def _read(self, fd: int) -> None:
        if (reader := self._readers.get(fd)) is not None:
            reader()

    def run_in_executor(  # type: ignore[override]  # a future either way
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Call it soon, without a thread."""
        called: asyncio.Future[T] = self.create_future()
        delay_s = self.world.luck.delay_s(self.world.thread_s)
        self.call_later(delay_s, _settle, called, partial(func, *args))
        return called

    def call_soon_threadsafe(  # type: ignore[override]  # as asyncio's but for its type variables
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _make_self_pipe(self) -> None:
        """Make none: no other thread wakes it."""

    def _close_self_pipe(self) -> None:
        """Do nothing: there is none."""

    def _see_failure(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Violation) and not self.is_dead:
            self.world.failures.append(f"{self.name}: {context['message']}: {error!r}")
            if error is not None:
                self.world.failures[-1] += "".join(traceback.format_exception(error))


def _settle(future: "asyncio.Future[T]", call: Callable[[], T]) -> None:
    try:
        result = call()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class World:
    """The clock, the loops, and all that happens outside of processes.

    There is no memory for a share ``lacks`` of copies and READs.
    """

    def __init__(self, seed: int, *, thread_s: float = 100e-6, lacks: float = 0.0) -> None:
        self.now = 0.0
        self.luck = Luck(seed)
        self.thread_s, self.lacks = thread_s, lacks
        self.failures: list[str] = []
        self.num_steps = self.num_lacking = self.num_events = 0
        self._loops: list[SimLoop] = []
        self._calls: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def new_loop(self, name: str) -> SimLoop:
        offset_s, rate = self.luck.uniform(0, 1e4), 1 + self.luck.uniform(-1e-4, 1e-4)
        loop = SimLoop(self, name, offset_s=offset_s, rate=rate)
        self._loops.append(loop)
        return loop

    def new_number(self) -> int:
        """Return a number that is unique in this world."""
        return next(self._numbers)

    def close(self) -> None:
        for loop in self._loops:
            loop.close()
        self._loops.clear()
        self._calls.clear()

    def lacks_memory(self) -> bool:
        is_short = self.luck.chance(self.lacks)
        self.num_lacking += is_short
        return is_short

    def watch(self, main: "asyncio.Task[None]", loop: SimLoop) -> None:
        """Check that the main task of a live process does not fail."""
        main.add_done_callback(lambda _: self._see_end(main, loop))

    def _see_end(self, main: "asyncio.Task[None]", loop: SimLoop) -> None:
        if not (main.cancelled() or loop.is_dead) and (error := main.exception()) is not None:
            self.failures.append("".join(traceback.format_exception(error)))

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Have something happen outside of processes."""
        heapq.heappush(self._calls, (self.now + delay_s, next(self._numbers), call, args))

    def fail(self, what: str, error: BaseException | None = None) -> None:
        """Raise the first violation, which ends the run."""
        failure = f"at {self.now:.6f} s: {what}"
        self.failures.append(failure)
        raise Violation(failure) from error

    def end(self, *, within_s: float, until: Callable[[], bool]) -> None:
        """Let processes end, without any check."""
        self._calls.clear()
        end = self.now + within_s
        while not until() and self._step(end):
            continue

    def run(self, until: Callable[[], bool], *, within_s: float) -> bool:
        """Go on until ``until`` holds; False when it does not in so many seconds."""
        end = self.now + within_s
        while not until():
            if not self._step(end):
                return False
            if self.failures:
                raise Violation(self.failures[0])
        return True

    def _step(self, end: float) -> bool:
        first, first_at = None, self._calls[0][0] if self._calls else float("inf")
        for loop in self._loops:
            if loop.is_frozen:
                continue
            at = loop.next_at()
            if at is not None and at < first_at:
                first, first_at = loop, at
        if first_at > end:
            return False
        self.now = max(self.now, first_at)
        self.num_steps += 1
        if not self.num_steps % _STEPS_OF_A_COLLECTION:
            gc.collect(1)
        if first is None:
            self.num_events += 1
            _, _, call, args = heapq.heappop(self._calls)
            call(*args)
        else:
            first.step()
            for _ in range(_MOST_TURNS):
                if not first.has_more or first.is_frozen:
                    first.busy_since = None
                    return True
                first.step()
            self.now += _TURNS_S
            self._see_spin(first)
        return True

    def _see_spin(self, loop: SimLoop) -> None:
        loop.busy_since = since = self.now if loop.busy_since is None else loop.busy_since
        if self.now - since > _SPINS_S:
            self.fail(f"{loop.name} has not come to rest for {_SPINS_S:g} s")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the product's names, secrets and pauses, and the order of anyio's tasks, from a seed."""
    drawn = random.Random(seed)
    state, collects = random.getstate(), gc.isenabled()
    random.seed(seed)
    gc.disable()
    with (
        patch("os.urandom", drawn.randbytes),
        patch("random._urandom", drawn.randbytes),
        patch.object(CancelScope, "__hash__", lambda scope: hash(scope._host_task)),
    ):
        try:
            yield
        finally:
            random.setstate(state)
            if collects:
                gc.enable()
