"""Measures how fast NIXL's READs are between two kinds of memory on this machine.

It makes two agents for that in this process; both are closed, with their memory, before it returns.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvbus.errors import ErrorCode, LocalError, TransferFailed
from kvbus.transport.bare_pair import LONG_BYTES, moved_rows, spaced_rows
from kvbus.transport.slicing import Rows
from kvbus.transport.transport import Transport
from kvbus.transport.types import MemoryKind, ReadOutcome, ReadStatus

ROUNDS = 5
CLOSE_TIMEOUT_S = 2.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Area:
    """Memory to measure with, of one or more times `LONG_BYTES`; ``owner`` keeps it alive."""

    address: int
    size_bytes: int
    device: int
    memory: MemoryKind
    owner: object


def measure_wire(name: str, to: Area, at: Area, *, timeout_s: float = 10.0) -> float:
    """Bytes per second of long READs between two areas: the best of a few rounds.

    Raises `LocalError` (timeout) after ``timeout_s``, `TransferFailed`, `SegmentError`.
    """
    with _pair(name, time.perf_counter() + timeout_s, to, at) as pair:
        pair.long_s()  # connects, and takes the faults of pages
        return LONG_BYTES / min(pair.long_s() for _ in range(ROUNDS))


class _Pair:
    """A reader, the peer that it reads from, and memory of both."""

    def __init__(
        self, reader: Transport, target: Transport, deadline: float, areas: tuple[Area, Area]
    ) -> None:
        self._reader, self._target, self._deadline = reader, target, deadline
        self._to, self._at = areas

        for transport, area in ((self._reader, self._to), (self._target, self._at)):
            future = transport.register(
                area.address, area.size_bytes, device=area.device, memory=area.memory
            )
            self._wait(future)
        metadata = self._wait(self._target.metadata())
        self._peer = self._wait(self._reader.add_peer(metadata))

    def long_s(self) -> float:
        """Seconds of one long descriptor, the mean of all places."""
        num_places = self._to.size_bytes // LONG_BYTES
        long = spaced_rows(num_places, LONG_BYTES, LONG_BYTES)
        return sum(self.read_s(long[n : n + 1]) for n in range(num_places)) / num_places

    def read_s(self, rows: Rows) -> float:
        """Seconds of one READ of ``rows``, whose addresses are offsets, from here to its end."""
        local, remote = (
            moved_rows(rows, area.address, area.device) for area in (self._to, self._at)
        )
        ended: Future[ReadOutcome] = Future()
        # The callback keeps the memory for as long as a handle may write into it.
        on_end: Callable[[ReadOutcome], None] = partial(_end, ended, (self._to, self._at))
        started_at = time.perf_counter()
        self._reader.read(
            self._peer,
            local,
            remote,
            on_end=on_end,
            local_memory=self._to.memory,
            remote_memory=self._at.memory,
        )
        outcome = self._wait(ended)
        if outcome.status is not ReadStatus.DONE:
            raise TransferFailed(f"a calibration read {outcome.status.value}: {outcome.error}")
        return time.perf_counter() - started_at

    def _wait(self, future: Future[Result]) -> Result:
        return _wait(future, self._deadline)


# The reader is closed first, while the target is still driven:
#
#     time-out ──▶ reader.close: its READ ends ──▶ target.close ──▶ memory is given back
#                     ▲ over TCP only a driven target brings it to its end
#
# A handle that is not terminal would keep the memory, the thread and the NIXL agent for the life of
# the process.
@contextlib.contextmanager
def _pair(name: str, deadline: float, to: Area, at: Area) -> Iterator[_Pair]:
    with (
        _transport(f"{name}/calibration/target", deadline) as target,
        target.hold_progress(),
        _transport(f"{name}/calibration/reader", deadline) as reader,
        reader.hold_progress(),
    ):
        yield _Pair(reader, target, deadline, (to, at))


@contextlib.contextmanager
def _transport(name: str, deadline: float) -> Iterator[Transport]:
    transport = Transport(name)
    started = transport.start()
    try:
        _wait(started, deadline)
        yield transport
    finally:
        closed = transport.close(timeout_s=CLOSE_TIMEOUT_S)
        with contextlib.suppress(TimeoutError):  # it ends by itself, later
            closed.result(CLOSE_TIMEOUT_S)


def _wait(future: Future[Result], deadline: float) -> Result:
    try:
        return future.result(max(0.0, deadline - time.perf_counter()))
    except TimeoutError as error:
        raise LocalError("NIXL was not measured in time", code=ErrorCode.TIMEOUT) from error


def _end(ended: Future[ReadOutcome], _: tuple[Area, Area], outcome: ReadOutcome) -> None:
    ended.set_result(outcome)
