"""Order of engines' requests behind their GPU work.

A request with ``after`` waits until this number is in the pages of the engine's ranks here. It
reaches the tables only then, so they know nothing of it. Later requests about the same offer or
fetch wait behind it:

     engine   launch step 7 · extend, after 7 · seal          step 7 ends: writes 7
     agent                        └ waits ───────┼────────────────────┴▶ extend ▶ seal
                                                 └ waits behind it
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvbus.agent.local_engine import LocalEngine, engine_lost
from kvbus.agent.loop import failure
from kvbus.bus import Call
from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.protocol.engine import NUM_SEQUENCE_WORDS

WAIT_S = 30.0
"""Time limit for GPU work that a request waits for."""
POLL_S = 1e-3
FIRST_POLLS = 10
"""Polls without a pause, about 0.1 ms: epoll has no shorter pause than `POLL_S`."""

Key = tuple[LocalEngine, object]
Queue = deque["_Waiting"]


@dataclass(slots=True, eq=False)
class _Waiting:
    key: Key
    call: Call
    run: Callable[[], None]
    number: int = 0
    on_refused: Callable[[], None] | None = None
    timer: asyncio.TimerHandle | None = None
    """Set until its number is reached."""

    @property
    def word(self) -> tuple[LocalEngine, int]:
        return self.key[0], self.number % NUM_SEQUENCE_WORDS

    def start(self) -> None:
        if self.call.was_ended:
            return
        try:
            self.run()
        except Exception as error:  # must not end the requests behind it
            self.refuse(failure(error))

    def refuse(self, error: KVBusError) -> None:
        if self.on_refused is not None:
            self.on_refused()
        if not self.call.answered:
            self.call.refuse(error)


@dataclass(slots=True)
class _Word:
    """Requests that wait for one word of an engine, the lowest number first."""

    engine: LocalEngine
    number: int
    heap: list[tuple[int, int, _Waiting]] = field(default_factory=list)


class Ordering:
    """Waiting requests of an agent; polls the pages while there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wait_s = WAIT_S
        self._loop, self._serial = loop, count()
        self._queues: dict[Key, Queue] = {}
        self._words: dict[tuple[LocalEngine, int], _Word] = {}
        self._poll_timer: asyncio.TimerHandle | None = None
        self._num_polls = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def submit(
        self,
        engine: LocalEngine,
        about: object,
        call: Call,
        run: Callable[[], None],
        *,
        after: int = 0,
        wait_s: float = math.inf,
        on_refused: Callable[[], None] | None = None,
    ) -> None:
        """Run now, or when ``after`` is reached and earlier requests ``about`` the same have run.

        Errors of ``run`` are raised, or refuse the call later, after ``on_refused``. Raises
        `LocalError` for a number of an engine that has passed no page.
        """
        is_reached = not after or engine.has_reached(after)
        queue = self._queues.get((engine, about))
        if is_reached and queue is None:
            run()
            return
        one = _Waiting((engine, about), call, run, after, on_refused)
        self._queues.setdefault(one.key, deque()).append(one)
        if not is_reached:
            self._await(one, min(wait_s, self.wait_s))

    def submit_last(self, engine: LocalEngine, call: Call, run: Callable[[], None]) -> None:
        """Run when all earlier requests of the engine have run."""
        queues = [queue for (of, _), queue in self._queues.items() if of is engine]
        num_left = len(queues)

        def passed() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                run()

        for queue in queues:
            queue.append(_Waiting(queue[0].key, call, passed))
        if not queues:
            run()

    def drop(self, engine: LocalEngine, about: object) -> None:
        """Drop requests whose callers have gone."""
        for one in self._queues.get((engine, about), ()):
            if one.timer is not None and one.call.was_ended:
                _stop(one)
                self._leave(one)
        self._advance((engine, about))

    def end_engine(self, engine: LocalEngine) -> None:
        """Refuse the requests of a lost engine."""
        for key in [key for key in self._queues if key[0] is engine]:
            queue = self._queues.pop(key)
            while queue:
                one = queue.popleft()
                _stop(one)
                one.refuse(engine_lost())
        for at in [key for key in self._words if key[0] is engine]:
            self._words.pop(at).heap.clear()  # `_poll` may be at it

    def close(self) -> None:
        for engine in {engine for engine, _ in self._queues}:
            self.end_engine(engine)
        if self._poll_timer is not None:
            self._poll_timer.cancel()

    def _await(self, one: _Waiting, wait_s: float) -> None:
        one.timer = self._loop.call_later(wait_s, self._time_out, one, wait_s)
        word = self._words.setdefault(one.word, _Word(*one.word))
        heapq.heappush(word.heap, (one.number, next(self._serial), one))
        self._num_polls = 0
        if self._poll_timer is None:
            self._poll_timer = self._loop.call_later(0.0, self._poll)

    def _poll(self) -> None:
        self._num_polls += 1
        pause_s = POLL_S if self._num_polls > FIRST_POLLS else 0.0
        self._poll_timer = self._loop.call_later(pause_s, self._poll)
        for at, word in list(self._words.items()):
            reached = word.engine.sequence_at(word.number)
            while word.heap and word.heap[0][0] <= reached:
                _, _, one = heapq.heappop(word.heap)
                self._reach(one)
            if not word.heap and self._words.get(at) is word:
                del self._words[at]
        if not self._words and self._poll_timer is not None:
            self._poll_timer.cancel()
            self._poll_timer = None

    def _reach(self, one: _Waiting) -> None:
        _stop(one)
        self._advance(one.key)

    def _leave(self, one: _Waiting) -> None:
        word = self._words[one.word]
        word.heap = [entry for entry in word.heap if entry[2] is not one]
        heapq.heapify(word.heap)

    def _time_out(self, one: _Waiting, wait_s: float) -> None:
        one.timer, engine_id = None, one.key[0].engine_id
        self._leave(one)
        one.run = partial(
            one.refuse,
            LocalError(
                f"the GPU work of number {one.number} of engine '{engine_id}' has not ended "
                f"within {wait_s:g} s, or was never recorded (Link.record)",
                code=ErrorCode.TIMEOUT,
            ),
        )
        self._advance(one.key)

    def _advance(self, key: Key) -> None:
        queue = self._queues.get(key)
        if queue is None:
            return  # its engine was lost
        while queue and queue[0].timer is None:
            queue.popleft().start()
        if not queue and self._queues.get(key) is queue:
            del self._queues[key]


def _stop(one: _Waiting) -> None:
    if one.timer is not None:
        one.timer.cancel()
        one.timer = None
