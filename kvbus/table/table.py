"""A sans-IO state machine for many entries: `handle` is the only way to change anything.

    event, now ──▶ handle ──▶ what is due by now expires first
                          ──▶ TRANSITIONS[entry.state, type(event)] ──▶ commands, in order
                          ──▶ the entry's next deadline is set, or the entry is retired

Refuses clocks, sockets, logs and random numbers: events and times come in, commands come out.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvbus.table.deadlines import Deadlines
from kvbus.table.events import DeadlinePassed
from kvbus.table.story import Story
from kvbus.table.transition import Context, Transition

K = TypeVar("K", bound=Hashable)
L = TypeVar("L")
C = TypeVar("C")


class Entry(Protocol):
    """What a table needs of its entries."""

    story: Story

    @property
    def key(self) -> Any:
        """What names it in the table."""

    @property
    def state(self) -> Any:
        """Where it is; a member of its `StrEnum`."""

    @property
    def is_over(self) -> bool:
        """Whether nothing happens to it any more."""

    @property
    def due_at(self) -> float | None:
        """When somebody must look at it again, None while only events move it."""

    def retire(self) -> None:
        """It is over: let go of what only a live entry needs."""


N = TypeVar("N", bound=Entry)


class Table(Generic[K, N, L, C]):
    """Live entries by key, and the last retired ones, so that a late event finds out what became.

    The key, the entry, the limits and the commands of a table are its type's parameters.
    """

    transitions: ClassVar[Mapping[tuple[Any, type[Any]], Transition[Any]]] = {}

    def __init__(self, limits: L, *, max_retired: int) -> None:
        self.limits = limits
        self.live: dict[K, N] = {}
        self.retired: OrderedDict[K, N] = OrderedDict()
        self._max_retired = max_retired
        self._deadlines: Deadlines[K] = Deadlines()

    def handle(self, event: Any, now: float) -> list[C]:
        """Apply ``event`` at time ``now`` and return what the agent has to do, in order.

        Whatever is due by ``now`` expires first: what comes too late is too late also when nobody
        told the table in between that time went by.
        """
        bound = self._deadlines.bound
        if bound is None or now < bound:
            return self._handle(event, now)
        return self._expire(now) + self._handle(event, now)

    def next_deadline(self) -> float | None:
        """When to send `DeadlinePassed` at the latest, or None while nothing can be due."""
        return self._deadlines.next()

    @property
    def deadline_bound(self) -> float | None:
        """No deadline is before this; it costs no search."""
        return self._deadlines.bound

    def _handle(self, event: Any, now: float) -> list[C]:
        """Apply ``event``; nothing is due."""
        raise NotImplementedError

    def find(self, key: K) -> N | None:
        """The entry, live or retired, if it is known."""
        return self.live.get(key) or self.retired.get(key)

    def story(self, key: K) -> list[str]:
        """What happened to an entry, a line for each event; empty when it is not known."""
        entry = self.find(key)
        return [] if entry is None else list(entry.story.lines())

    def _add(self, entry: N) -> None:
        self.live[entry.key] = entry
        self._deadlines.set(entry.key, entry.due_at)

    def _apply(self, entry: N, event: object, now: float) -> list[C]:
        transition = self.transitions[entry.state, type(event)]
        commands: list[C] = transition.handler(entry, event, Context(now, self.limits))
        entry.story.note(now, event, entry.state, commands)
        self._settle(entry)
        return commands

    def _apply_all(self, entries: Iterable[N], event: object, now: float) -> list[C]:
        return [command for entry in list(entries) for command in self._apply(entry, event, now)]

    def _expire(self, now: float) -> list[C]:
        """Whatever is due by ``now``, the earliest first."""
        commands: list[C] = []
        for key in self._deadlines.pop_due(now):
            commands += self._apply(self.live[key], DeadlinePassed(), now)
        return commands

    def _settle(self, entry: N) -> None:
        """The entry has changed: look at it again when it says so, or retire it."""
        if not entry.is_over:
            self._deadlines.set(entry.key, entry.due_at)
        elif entry.key in self.live:
            self._retire(entry)

    def _retire(self, entry: N) -> None:
        del self.live[entry.key]
        self._deadlines.discard(entry.key)
        entry.retire()
        self.retired[entry.key] = entry
        while len(self.retired) > self._max_retired:
            self.retired.popitem(last=False)
