"""A sans-IO state machine for many entries, which only `handle` changes.

    event, now ──▶ handle ──▶ entries that are due expire first
                          ──▶ TRANSITIONS[entry.state, kind of event] ──▶ commands, in order
                          ──▶ the entry's next deadline is set, or the entry is retired

It has no clock, socket, log or random numbers. A `Driver` feeds it and runs its commands.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from kvbus.table.events import DeadlinePassed, Refuse, SendReply

K = TypeVar("K", bound=Hashable)
L = TypeVar("L")
C = TypeVar("C")
S = TypeVar("S", bound=StrEnum)
E = TypeVar("E")
T = TypeVar("T")

MAX_STEPS = 32
ENTRY_BYTES, STEP_BYTES = 1808, 192
"""Approximate memory of a retired entry and of a step, on Python 3.12."""
KEPT_S, KEPT_ANYWAY = 60.0, 1024
"""Retired entries: kept this long if the bounds allow it, and this many for longer."""
MOST_NAMESAKES = 64
"""Retired entries that are found by one name."""

Handler = Callable[..., list[Any]]
Step = tuple[float, str, type[Any], str, tuple[type[Any], ...], str]
"""Time, part, kind of the event or of its message, next state, kinds of commands, error."""


@dataclass(frozen=True, slots=True)
class Transition(Generic[S]):
    handler: Handler
    to: tuple[S, ...]


def transitions(
    *rows: tuple[Sequence[S], Sequence[type[Any]], Handler, Sequence[S]],
) -> Mapping[tuple[S, type[Any]], Transition[S]]:
    """Expand rows (states, event types, handler, next states); without next, the state stays."""
    return {
        (state, kind): Transition(handler, tuple(to) or (state,))
        for states, kinds, handler, to in rows
        for state in states
        for kind in kinds
    }


class Context(msgspec.Struct, Generic[L], frozen=True):
    now: float
    limits: L


class History:
    """The last `MAX_STEPS` events of one entry, without block tables and tracebacks."""

    __slots__ = ("_steps", "kept_bytes", "retired_at", "started_at")

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=MAX_STEPS)
        self.started_at: float | None = None
        self.retired_at, self.kept_bytes = 0.0, 0

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._steps)

    def note(
        self, now: float, event: object, state: str, commands: Sequence[object], about: str = ""
    ) -> None:
        if self.started_at is None:
            self.started_at = now
        error = getattr(event, "error", None)
        text = "" if error is None else f"{error.code}: {error.message}"
        kind, kinds = type(getattr(event, "message", event)), tuple(map(type, commands))
        self._steps.append((now, about, kind, state, kinds, text))

    def retire(self) -> None:
        texts = [len(step[1]) + len(step[-1]) for step in self._steps]
        self.retired_at = self._steps[-1][0]
        self.kept_bytes = ENTRY_BYTES + STEP_BYTES * len(texts) + sum(texts)

    def lines(self) -> Iterator[str]:
        started_at = self._steps[0][0] if self._steps else 0.0
        for time_s, part, event, state, commands, error in self._steps:
            names = ", ".join(command.__name__ for command in commands) or "-"
            what = f"{part} {event.__name__}".lstrip() + (f" ({error})" if error else "")
            yield f"+{time_s - started_at:.6f} s  {what} -> {state}: {names}"


class Entry(Protocol):
    """An entry of a table, named by ``key``. `DeadlinePassed` is applied at ``due_at``.

    ``retire`` frees what only a live entry needs.
    """

    history: History

    @property
    def key(self) -> Any: ...

    @property
    def state(self) -> Any: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def due_at(self) -> float | None: ...

    def retire(self) -> None: ...


N = TypeVar("N", bound=Entry)


class Deadlines(Generic[K]):
    """A heap with lazy deletion; a key has at most one deadline."""

    def __init__(self) -> None:
        self.bound = math.inf
        """A lower bound of all deadlines, without the search of `next`."""
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0

    def set(self, key: K, when: float | None) -> None:
        if when is None:
            self._when.pop(key, None)
            return
        if self._when.get(key) == when:
            return
        self._when[key] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, key))
        if len(self._heap) > 64 + 4 * len(self._when):
            self._heap = [(at, order, one) for order, (one, at) in enumerate(self._when.items())]
            heapq.heapify(self._heap)
        self.bound = self._heap[0][0]

    def next(self) -> float | None:
        heap, when_of = self._heap, self._when
        while heap and when_of.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        self.bound = heap[0][0] if heap else math.inf
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> Iterator[K]:
        while (when := self.next()) is not None and when <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._when[key]
            yield key


class Table(Generic[K, N, L, C]):
    """Live entries by key, and the last retired ones, for late events."""

    transitions: ClassVar[Mapping[tuple[Any, type[Any]], Transition[Any]]] = {}

    def __init__(self, limits: L, *, max_retired_bytes: int) -> None:
        self.limits = limits
        self.live: dict[K, N] = {}
        self.retired: OrderedDict[K, N] = OrderedDict()
        self.retired_bytes = 0
        self.deadlines: Deadlines[K] = Deadlines()
        self._max_retired_bytes = max_retired_bytes
        self._retired_as: dict[str, tuple[K, ...]] = {}

    def handle(self, event: Any, now: float) -> list[C]:
        """Apply ``event`` and return the agent's commands, in order.

        Entries that are due expire first, even without `DeadlinePassed`: a late event is always
        late.
        """
        if now < self.deadlines.bound:
            return self._handle(event, now)
        return self._expire(now) + self._handle(event, now)

    def _handle(self, event: Any, now: float) -> list[C]:
        raise NotImplementedError

    def find(self, key: K) -> N | None:
        return self.live.get(key) or self.retired.get(key)

    # Live entries number a few thousand and are scanned. Retired ones are too many to scan on the
    # event loop (tens of ms).
    def named(self, name: str) -> list[N]:
        """Return live and retired entries, oldest first."""
        retired = [self.retired[key] for key in self._retired_as.get(name, ())]
        return retired + [one for one in self.live.values() if name in self._names_of(one)]

    def newest(self, number: int) -> list[N]:
        """Return live entries first, the newest of each first."""
        newest = chain(reversed(self.live.values()), reversed(self.retired.values()))
        return list(islice(newest, number))

    def _names_of(self, _entry: N) -> tuple[str, ...]:
        """Return names, which entries may share."""
        return ()

    def _add(self, entry: N, event: object, now: float, commands: Sequence[C]) -> None:
        self.live[entry.key] = entry
        entry.history.note(now, event, entry.state, commands)
        self.deadlines.set(entry.key, entry.due_at)

    def _apply(self, entry: N, event: object, now: float) -> list[C]:
        # An event with a message is known by the class of its message.
        transition = self.transitions[entry.state, type(getattr(event, "message", event))]
        commands: list[C] = transition.handler(entry, event, Context(now, self.limits))
        entry.history.note(now, event, entry.state, commands)
        is_over, key = entry.is_over, entry.key
        self.deadlines.set(key, None if is_over else entry.due_at)
        if is_over and key in self.live:
            self._retire(entry)
        return commands

    def _apply_all(self, entries: Iterable[N], event: object, now: float) -> list[C]:
        return [command for entry in list(entries) for command in self._apply(entry, event, now)]

    def _expire(self, now: float) -> list[C]:
        commands: list[C] = []
        for key in self.deadlines.pop_due(now):
            commands += self._apply(self.live[key], DeadlinePassed(), now)
        return commands

    # A late event comes soon or never, so age is the first bound. The memory is that of a minute's
    # handoffs, and then stops growing. A slow agent keeps some entries for longer, for later
    # queries about them.
    def _retire(self, entry: N) -> None:
        key, history = entry.key, entry.history
        del self.live[key]
        entry.retire()
        history.retire()
        self.retired[key] = entry
        self.retired_bytes += history.kept_bytes
        for name in self._names_of(entry):
            others = self._retired_as.get(name, ())[1 - MOST_NAMESAKES :]
            self._retired_as[name] = (*others, key)
        while self.retired_bytes > self._max_retired_bytes or (
            len(self.retired) > KEPT_ANYWAY
            and next(iter(self.retired.values())).history.retired_at < history.retired_at - KEPT_S
        ):
            self._remove(next(iter(self.retired)))

    def _remove(self, key: K) -> N | None:
        entry = self.retired.pop(key, None)
        if entry is not None:
            self.retired_bytes -= entry.history.kept_bytes
            for name in self._names_of(entry):
                left = tuple(one for one in self._retired_as.pop(name, ()) if one != key)
                if left:
                    self._retired_as[name] = left
        return entry


class Promise(Generic[E]):
    """The event that a command must cause: call it with the event, or `fail` it, once.

    A dropped promise fails by itself.
    """

    __slots__ = ("_driver", "_failed", "is_kept")

    def __init__(self, driver: "Driver[E]", failed: Callable[[Exception], E]) -> None:
        self._driver, self._failed, self.is_kept = driver, failed, False

    def __call__(self, event: E) -> None:
        if self.is_kept:
            raise RuntimeError(f"a command is answered twice: {type(event).__name__}")
        self.is_kept = True
        self._driver.dispatch(event)

    def fail(self, error: Exception) -> None:
        if not self.is_kept:
            self(self._failed(error))

    def __del__(self) -> None:
        if not self.is_kept:  # in any thread
            self._driver.fail_later(self._failed)


class Clock(Protocol):
    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], Any], /) -> Any: ...

    def call_soon_threadsafe(self, callback: Callable[[], object], /) -> Any: ...


class Driver(Generic[E]):
    """Feeds ``table`` with events and runs its commands, in the event loop's thread.

    Before the first event, its owner fills ``commands``, and registers those that cause an event
    with `promise`. Without ``on_defect``, `dispatch` raises exceptions of commands.
    """

    def __init__(
        self,
        table: Table[Any, Any, Any, Any],
        loop: Clock,
        *,
        on_defect: Callable[[Exception], object] | None = None,
    ) -> None:
        self.commands: dict[type[Any], Callable[[Any], None]] = {
            SendReply: _reply,
            Refuse: _refuse,
        }
        self._on_defect = on_defect
        self._table, self._loop = table, loop
        self._events: deque[E | DeadlinePassed] = deque()
        self._running = self._is_stopped = False
        self._alarm: Any = None
        self._alarm_at = float("inf")

    def promise(
        self,
        kind: type[T],
        do: Callable[[T, Promise[E]], None],
        failed: Callable[[T, Exception], E],
    ) -> None:
        """Run commands of this ``kind`` with ``do``, each with the `Promise` of its event.

        A ``do`` that raises must have started nothing.
        """

        def run(command: T) -> None:
            promise = Promise(self, partial(failed, command))
            try:
                do(command, promise)
            except Exception as error:
                if promise.is_kept:
                    raise
                promise.fail(error)

        self.commands[kind] = run

    @property
    def now(self) -> float:
        return self._loop.time()

    # A command may cause an event: a request that cannot be sent fails immediately. The event waits
    # for the earlier commands, as the table's state assumes that all of them have started.
    #
    #     dispatch(A) ─▶ handle ─▶ [c1, c2] ─▶ c1 ─▶ dispatch(B): queued
    #                                        ─▶ c2
    #                 ─▶ handle(B) ─▶ ...
    def dispatch(self, event: E | DeadlinePassed) -> None:
        self._events.append(event)
        if self._running:
            return
        self._running, errors = True, list[Exception]()
        try:
            while self._events:
                for command in self._table.handle(self._events.popleft(), self._loop.time()):
                    try:
                        self.commands[type(command)](command)
                    except Exception as error:  # such as no memory: run the others
                        if self._on_defect is not None:
                            self._on_defect(error)
                        else:
                            errors.append(error)
        finally:
            self._running = False
            if self._table.deadlines.bound < self._alarm_at:
                self._set_alarm()
        if errors:
            raise ExceptionGroup("commands failed", errors) if errors[1:] else errors[0]

    def fail_later(self, failure: Callable[[Exception], E]) -> None:
        """Dispatch the ``failure`` of a command whose `Promise` was dropped; thread-safe."""

        def fail() -> None:
            if not self._is_stopped:
                self.dispatch(failure(RuntimeError("a command was dropped without its event")))

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(fail)

    def stop(self) -> None:
        self._is_stopped = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, float("-inf")

    def _set_alarm(self) -> None:
        """Keep one timer, at or before the next deadline; an early one checks again."""
        when = self._table.deadlines.next()
        if when is None or when >= self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = self._loop.call_at(when, self._ring), when

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, float("inf")
        self.dispatch(DeadlinePassed())


def _reply(command: SendReply) -> None:
    command.reply_to.reply(command.body)


def _refuse(command: Refuse) -> None:
    command.reply_to.refuse(command.error)
