"""A sans-IO state machine for many entries: `handle` is the only way to change anything.

    event, now ──▶ handle ──▶ what is due by now expires first
                          ──▶ TRANSITIONS[entry.state, kind of event] ──▶ commands, in order
                          ──▶ the entry's next deadline is set, or the entry is retired

There is no clock, socket, log or random number: events and times come in, commands come out. A
`Driver` feeds a table in an event loop, and runs its commands.
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
"""About what a retired entry takes, and a step of its story: measured, on Python 3.12."""
KEPT_S, KEPT_ANYWAY = 60.0, 1024
"""How long a retired entry is kept where the bounds allow it, and how many of them for longer."""
MOST_NAMESAKES = 64
"""Retired entries of one name that are found by it, the newest: names are the engines' to give."""

Handler = Callable[..., list[Any]]
Step = tuple[float, str, type[Any], str, tuple[type[Any], ...], str]
"""When, about which part, the kind of event or of its message, the state after it, kinds of
commands, the error."""


@dataclass(frozen=True, slots=True)
class Transition(Generic[S]):
    """``handler(entry, event, context)`` returns the commands, in order."""

    handler: Handler
    to: tuple[S, ...]


def transitions(
    *rows: tuple[Sequence[S], Sequence[type[Any]], Handler, Sequence[S]],
) -> Mapping[tuple[S, type[Any]], Transition[S]]:
    """Of rows (states, kinds of events, handler, states after it); without any, none changes."""
    return {
        (state, kind): Transition(handler, tuple(to) or (state,))
        for states, kinds, handler, to in rows
        for state in states
        for kind in kinds
    }


class Context(msgspec.Struct, Generic[L], frozen=True):
    """What a handler may know of the world: the time in seconds, and the bounds of its table."""

    now: float
    limits: L


class Story:
    """What happened to one entry: the last `MAX_STEPS` events, and what each led to, oldest first.

    Of events and commands it keeps the kinds, and the text of an error: a story must not keep block
    tables, requests or tracebacks alive.
    """

    __slots__ = ("_steps", "kept_bytes", "retired_at", "started_at")

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=MAX_STEPS)
        self.started_at: float | None = None
        """When the first event came, kept or not."""
        self.retired_at, self.kept_bytes = 0.0, 0
        """When its entry was retired, and about how much memory it takes since."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those that are kept, the oldest first."""
        return tuple(self._steps)

    def note(
        self, now: float, event: object, state: str, commands: Sequence[object], about: str = ""
    ) -> None:
        """``event`` came at ``now``, left ``state``, and led to ``commands``."""
        if self.started_at is None:
            self.started_at = now
        error = getattr(event, "error", None)
        text = "" if error is None else f"{error.code}: {error.message}"
        kind, kinds = type(getattr(event, "message", event)), tuple(map(type, commands))
        self._steps.append((now, about, kind, state, kinds, text))

    def retire(self) -> None:
        """Its entry is over, with the last step."""
        texts = [len(step[1]) + len(step[-1]) for step in self._steps]
        self.retired_at = self._steps[-1][0]
        self.kept_bytes = ENTRY_BYTES + STEP_BYTES * len(texts) + sum(texts)

    def lines(self) -> Iterator[str]:
        """A line for each step; its time counts from the first that is kept."""
        started_at = self._steps[0][0] if self._steps else 0.0
        for now, about, event, state, commands, error in self._steps:
            led_to = ", ".join(kind.__name__ for kind in commands) or "-"
            what = f"{about} {event.__name__}".lstrip() + (f" ({error})" if error else "")
            yield f"+{now - started_at:.6f} s  {what} -> {state}: {led_to}"


class Entry(Protocol):
    """What a table needs of its entries.

    Its ``key`` names it in the table, its ``state`` is a member of a `StrEnum`. At ``due_at`` the
    table must look at it again; None while only events move it. One that ``is_over`` is told to
    ``retire``: to let go of what only a live entry needs.
    """

    story: Story

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
    """A heap with lazy deletion: a key has at most one deadline, set again as often as needed."""

    def __init__(self) -> None:
        self.bound = math.inf
        """No deadline is before this; it costs no search, unlike `next`."""
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0

    def set(self, key: K, when: float | None) -> None:
        """Make ``when`` the deadline of ``key``, in place of any earlier one; None for none."""
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
        """The earliest deadline, or None when there is none."""
        heap, when_of = self._heap, self._when
        while heap and when_of.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        self.bound = heap[0][0] if heap else math.inf
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> Iterator[K]:
        """Each key whose deadline is not after ``now``; its deadline is forgotten first."""
        while (when := self.next()) is not None and when <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._when[key]
            yield key


class Table(Generic[K, N, L, C]):
    """Live entries by key, and the last retired ones, so that a late event finds out what became.

    The key, the entry, the limits and the commands of a table are its type's parameters.
    """

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
        """Apply ``event`` at time ``now`` and return what the agent has to do, in order.

        Whatever is due by ``now`` expires first: what comes too late is too late also when no
        `DeadlinePassed` came in between.
        """
        if now < self.deadlines.bound:
            return self._handle(event, now)
        return self._expire(now) + self._handle(event, now)

    def _handle(self, event: Any, now: float) -> list[C]:
        """Apply ``event``; nothing is due."""
        raise NotImplementedError

    def find(self, key: K) -> N | None:
        """The entry, live or retired, if it is known."""
        return self.live.get(key) or self.retired.get(key)

    # Of those that live there are some thousands, which are looked at one by one; those that have
    # retired are so many that this would hold the event loop for tens of milliseconds.
    def named(self, name: str) -> list[N]:
        """The entries of this name, live or among the last retired, the oldest first."""
        retired = [self.retired[key] for key in self._retired_as.get(name, ())]
        return retired + [one for one in self.live.values() if name in self._names_of(one)]

    def newest(self, number: int) -> list[N]:
        """At most so many entries, the newest first, and live ones before the others."""
        newest = chain(reversed(self.live.values()), reversed(self.retired.values()))
        return list(islice(newest, number))

    def _names_of(self, _entry: N) -> tuple[str, ...]:
        """What an entry is looked for by, and others may be as well."""
        return ()

    def _add(self, entry: N, event: object, now: float, commands: Sequence[C]) -> None:
        """``event`` has made a new entry, and leads to ``commands``."""
        self.live[entry.key] = entry
        entry.story.note(now, event, entry.state, commands)
        self.deadlines.set(entry.key, entry.due_at)

    def _apply(self, entry: N, event: object, now: float) -> list[C]:
        # An event that has a message is known by the class of that.
        transition = self.transitions[entry.state, type(getattr(event, "message", event))]
        commands: list[C] = transition.handler(entry, event, Context(now, self.limits))
        entry.story.note(now, event, entry.state, commands)
        is_over, key = entry.is_over, entry.key
        self.deadlines.set(key, None if is_over else entry.due_at)
        if is_over and key in self.live:
            self._retire(entry)
        return commands

    def _apply_all(self, entries: Iterable[N], event: object, now: float) -> list[C]:
        return [command for entry in list(entries) for command in self._apply(entry, event, now)]

    def _expire(self, now: float) -> list[C]:
        """Whatever is due by ``now``, the earliest first."""
        commands: list[C] = []
        for key in self.deadlines.pop_due(now):
            commands += self._apply(self.live[key], DeadlinePassed(), now)
        return commands

    # A late event comes soon or never, so age is the first bound: an agent takes as much as its
    # handoffs of a minute do, and grows no more after that. A slow agent remembers some for longer,
    # for those who ask what happened.
    def _retire(self, entry: N) -> None:
        """It is over; its deadline is forgotten already."""
        key, story = entry.key, entry.story
        del self.live[key]
        entry.retire()
        story.retire()
        self.retired[key] = entry
        self.retired_bytes += story.kept_bytes
        for name in self._names_of(entry):
            others = self._retired_as.get(name, ())[1 - MOST_NAMESAKES :]
            self._retired_as[name] = (*others, key)
        while self.retired_bytes > self._max_retired_bytes or (
            len(self.retired) > KEPT_ANYWAY
            and next(iter(self.retired.values())).story.retired_at < story.retired_at - KEPT_S
        ):
            self._forget(next(iter(self.retired)))

    def _forget(self, key: K) -> N | None:
        """Drop a retired entry, if it is one."""
        entry = self.retired.pop(key, None)
        if entry is not None:
            self.retired_bytes -= entry.story.kept_bytes
            for name in self._names_of(entry):
                left = tuple(one for one in self._retired_as.pop(name, ()) if one != key)
                if left:
                    self._retired_as[name] = left
        return entry


class Promise(Generic[E]):
    """The one event that a command promises: call it with that event, or `fail` it, once.

    A dropped promise fails by itself: without its event, an entry would wait for ever.
    """

    __slots__ = ("_driver", "_failed", "is_kept")

    def __init__(self, driver: "Driver[E]", failed: Callable[[Exception], E]) -> None:
        self._driver, self._failed, self.is_kept = driver, failed, False

    def __call__(self, event: E) -> None:
        """Dispatch ``event``; raises `RuntimeError` for a second one."""
        if self.is_kept:
            raise RuntimeError(f"a command is answered twice: {type(event).__name__}")
        self.is_kept = True
        self._driver.dispatch(event)

    def fail(self, error: Exception) -> None:
        """Dispatch the event of a failure, unless there was an event before."""
        if not self.is_kept:
            self(self._failed(error))

    def __del__(self) -> None:
        if not self.is_kept:  # in any thread
            self._driver.fail_later(self._failed)


class Clock(Protocol):
    """What a driver needs of an event loop."""

    def time(self) -> float:
        """Now, in seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], Any], /) -> Any:
        """Have ``callback`` called at ``when``; the result has a ``cancel``."""
        ...

    def call_soon_threadsafe(self, callback: Callable[[], object], /) -> Any:
        """Have ``callback`` called soon, from any thread."""
        ...


class Driver(Generic[E]):
    """Feeds ``table``, and hands each command to the one of ``commands`` for its class.

    All in the event loop's thread. Replies go to the call that was asked with; ``commands`` has
    what is done for the others, and is filled by its owner before the first event. Commands that
    promise an event are registered with `promise`.

    ``on_defect`` gets what commands raised; without it `dispatch` raises that.
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
        """Give commands of this ``kind`` to ``do``, each with the `Promise` of its one event.

        ``failed`` makes the event of a failure. If ``do`` raises, it must have begun nothing.
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
        """The clock of every time that the table sees, in seconds."""
        return self._loop.time()

    # Commands may cause events, as a request that cannot be sent fails at once. Those wait until
    # the commands before them are done: the table has been left in the state in which all of them
    # are under way.
    #
    #     dispatch(A) ─▶ handle ─▶ [c1, c2] ─▶ c1 ─▶ dispatch(B): queued
    #                                        ─▶ c2
    #                 ─▶ handle(B) ─▶ ...
    def dispatch(self, event: E | DeadlinePassed) -> None:
        """Apply ``event`` and everything that follows from it; then raise what commands raised."""
        self._events.append(event)
        if self._running:
            return
        self._running, errors = True, list[Exception]()
        try:
            while self._events:
                for command in self._table.handle(self._events.popleft(), self._loop.time()):
                    try:
                        self.commands[type(command)](command)
                    except Exception as error:  # no thread, no memory, a defect: others go on
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

    def fail_later(self, failed: Callable[[Exception], E]) -> None:
        """Dispatch, in the loop, the event of a dropped command; called from any thread."""

        def fail() -> None:
            if not self._is_stopped:
                self.dispatch(failed(RuntimeError("a command was dropped without its event")))

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(fail)

    def stop(self) -> None:
        """No alarm from now on."""
        self._is_stopped = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, float("-inf")

    def _set_alarm(self) -> None:
        """Keep one timer, never later than the next deadline; an early one only looks again.

        The bound may be that of a deadline which the same event has put off: it is looked at.
        """
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
