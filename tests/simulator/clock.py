"""Time that only moves when nothing is left to do in it, and processes that live in it.

Refuses real time and threads: two worlds of one seed do the same in the same order.
"""

import heapq
from collections.abc import Callable
from typing import Any

Entry = tuple[float, int, "Process | None", int, Callable[..., Any], Any]

ANY_LIFE = -1
"""Of what comes to whoever lives there by then, as a message does."""


class Clock:
    """What is to happen, by time; of one time, in the order in which it was said.

    Most of it is deadlines of many seconds, of which nothing comes: these wait outside of the
    heap, second by second, as a large heap is not in the CPU's caches.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_steps = 0
        self._heap: list[Entry] = []
        self._heap_until = 1.0
        self._later: dict[int, list[Entry]] = {}
        self._order = 0

    def at(
        self,
        when: float,
        call: Callable[..., Any],
        *args: Any,
        process: "Process | None" = None,
        life: int = ANY_LIFE,
    ) -> None:
        """Have ``call`` made at ``when``: by a process in that life of its, or by nature."""
        self._order += 1
        entry = when, self._order, process, life, call, args
        if when < self._heap_until:
            heapq.heappush(self._heap, entry)
        else:
            self._later.setdefault(int(when), []).append(entry)

    def run(self, until: float = float("inf"), *, is_over: Callable[[], bool]) -> None:
        """Make all calls up to ``until``, or as long as ``is_over`` says no."""
        heap, pop = self._heap, heapq.heappop
        while (heap or self._begin_second()) and heap[0][0] <= until and not is_over():
            when, _, process, life, call, args = pop(heap)
            self.now = when
            self.num_steps += 1
            if process is None:
                call(*args)
            elif process.up and life in (ANY_LIFE, process.life):
                if process.stopped:
                    process.late.append((call, args))
                else:
                    call(*args)

    def _begin_second(self) -> bool:
        """All before it is done; returns whether anything is left."""
        if not self._later:
            return False
        second = min(self._later)
        self._heap[:] = self._later.pop(second)
        heapq.heapify(self._heap)
        self._heap_until = second + 1.0
        return True


class Alarm:
    """A call that a process wants made, as an event loop keeps it."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call

    def cancel(self) -> None:
        """Do not make it."""
        self._call = None

    def ring(self) -> None:
        """It is time."""
        if self._call is not None:
            self._call()


class Process:
    """A process with a clock of its own, which is what `kvbus.table.Driver` needs of a loop.

    Its time is ``offset`` + ``rate`` * the world's. Stopped, it does nothing and misses nothing:
    all that would have happened happens late. Ended and begun again, it has another ``life``.
    """

    def __init__(self, name: str, clock: Clock, *, offset: float, rate: float) -> None:
        self.name, self.clock = name, clock
        self._offset, self._rate = offset, rate
        self.life = 0
        self.up = True
        self.stopped = False
        self.resumed_at = 0.0
        self.late: list[tuple[Callable[..., Any], Any]] = []

    @property
    def is_late(self) -> bool:
        """Whether it does now what it would have done while it was stopped."""
        return self.resumed_at == self.clock.now

    def time(self) -> float:
        """Now, by its own clock."""
        return self._offset + self._rate * self.clock.now

    def call_at(self, when: float, callback: Callable[[], Any], /) -> Alarm:
        """Have ``callback`` called, unless it is cancelled or the process ends before."""
        alarm = Alarm(callback)
        # A little later: what is due at `when` must be due by the float that `time` makes of it.
        at = (when - self._offset) / self._rate + 1e-9
        self.clock.at(max(at, self.clock.now), alarm.ring, process=self, life=self.life)
        return alarm

    def after(self, elapsed_s: float, call: Callable[..., Any], *args: Any) -> None:
        """Have ``call`` made when so much of its own time has passed, if it lives by then."""
        at = self.clock.now + elapsed_s / self._rate
        self.clock.at(at, call, *args, process=self, life=self.life)

    def stop(self) -> None:
        """It does nothing from now on."""
        self.stopped = True

    def resume(self) -> None:
        """It goes on with all that it has missed, in the order in which that came."""
        self.stopped, self.resumed_at = False, self.clock.now
        late, self.late = self.late, []
        for call, args in late:
            self.clock.at(self.clock.now, call, *args, process=self, life=self.life)

    def end(self) -> None:
        """It is gone, and what it wanted to do with it."""
        self.up, self.stopped = False, False
        self.life += 1
        self.late = []

    def begin(self) -> None:
        """Its next life."""
        self.up = True
        self.resumed_at = self.clock.now
