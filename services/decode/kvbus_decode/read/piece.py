"""One piece of a fetch on its way into the ranks that are here: what it is, and how far it is.

Refuses to end twice, or while anything of it can still write into the engine's memory.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvbus.errors import ErrorCode, KVBusError, LocalError
from kvbus.geometry import BlockTable
from kvbus.planning import FetchShape, Spans
from kvbus_decode.peer.route import Route

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions by group, from the offer's blocks into the fetch's.

    ``spread`` chooses among replicas. ``tail`` are positions behind the last token that are zeroed
    after the read. The offer's lease is ``epoch``'s; ``deadline`` is a time of the event loop.
    """

    route: Route
    offer_id: str
    epoch: int
    source: Mapping[str, BlockTable]
    target: Mapping[str, BlockTable]
    spans: Spans
    tail: Spans
    spread: int
    deadline: float


@dataclass(slots=True, eq=False)
class PieceRead:
    """A piece under way. Whoever works on it calls `begin` before and `end` after.

    ``on_end`` is called once, after the last `end`. The first error stops the rest. ``shape`` is
    set when the path was chosen by prediction. ``finish`` is called when all bytes have landed, and
    may begin more.
    """

    piece: Piece
    on_end: Callable[["PieceRead"], None]
    num_bytes: int = 0
    path: str = ""
    error: KVBusError | None = None
    ended: bool = False
    shape: FetchShape | None = None
    finish: Callable[[], None] | None = None
    _num_parts: int = 0
    _on_stop: dict[Callable[[], None], None] = field(default_factory=dict)

    @property
    def stopped(self) -> bool:
        """Whether nothing new of it may start."""
        return self.error is not None

    def begin(self) -> None:
        """Something of it starts."""
        self._num_parts += 1

    def end(self, num_bytes: int = 0, error: KVBusError | None = None) -> None:
        """Something of it is over: nothing of that can write any more."""
        self.num_bytes += num_bytes
        if error is not None:
            self.fail(error)
        self._num_parts -= 1
        finish, self.finish = (self.finish, None) if not self._num_parts else (None, self.finish)
        if finish is not None and not self.stopped:
            self.begin()
            finish()
            self.end()
        elif self._num_parts == 0 and not self.ended:
            self.ended = True
            self.on_end(self)

    def fail(self, error: KVBusError) -> None:
        """Stop the rest, because of ``error``; what is in flight ends by itself."""
        if self.error is not None:
            return
        self.error = error
        for stop in list(self._on_stop):
            stop()
        self._on_stop.clear()

    def abort(self) -> None:
        """Stop, because nobody wants the bytes any more."""
        self.fail(LocalError("the read was aborted", code=ErrorCode.CANCELLED))

    def on_stop(self, stop: Callable[[], None]) -> Callable[[], None]:
        """Have ``stop`` called when the piece stops; returns what to call to have it no more."""
        if self.stopped:
            stop()
            return lambda: None
        self._on_stop[stop] = None
        return partial(self._forget, stop)

    def _forget(self, stop: Callable[[], None]) -> None:
        self._on_stop.pop(stop, None)

    async def unless_stopped(self, future: "asyncio.Future[T]") -> T:
        """The future's result; raises the piece's error when that comes first."""

        def stop() -> None:
            if not future.done() and self.error is not None:
                future.set_exception(self.error)

        forget = self.on_stop(stop)
        try:
            return await future
        finally:
            forget()
