"""Runs copies on a stream of the agent's own, each after what the engine had done before it asked.

No stream of ours waits for another process: one that dies would leave it waiting. The thread that
copies waits for the engine's events instead, for as long as the engine lives.
"""

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

from kvbus.errors import ErrorCode, LocalError, SegmentError

WAIT_S = 30.0
"""How long the engine's stream may go on working on what it says is ready."""
POLL_S = 50e-6

T = TypeVar("T")


class Event(Protocol):
    """What is asked of an event."""

    def query(self) -> bool:
        """Whether all that was recorded is done."""
        ...


class CopyStream:
    """The copies of one rank on a GPU; several threads may run some, one after the other there.

    ``events`` are handles of the engine's events. Raises `SegmentError` for one that is none.
    """

    def __init__(self, ordinal: int, events: Iterable[bytes]) -> None:
        device = torch.device("cuda", ordinal)
        open_event: Callable[[torch.device, bytes], Event] = torch.cuda.Event.from_ipc_handle
        try:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
            self._events = [open_event(device, handle) for handle in events]
        except RuntimeError as error:
            raise SegmentError(f"the engine's CUDA event cannot be opened: {error}") from error

    def run(self, copy: Callable[[], T], *, gone: Callable[[], bool]) -> T:
        """What ``copy`` returns, once its bytes are there; ``gone`` says if the engine has ended.

        Raises `LocalError` (``engine_lost``, ``timeout``), and what ``copy`` raises.
        """
        wait_for(self._events, gone=gone)
        with torch.cuda.stream(self._stream):
            try:
                return copy()
            finally:
                self._stream.synchronize()


def wait_for(
    events: Iterable[Event], *, gone: Callable[[], bool], timeout_s: float = WAIT_S
) -> None:
    """Return once every event has come; raises `LocalError` (``engine_lost`` or ``timeout``)."""
    deadline = time.monotonic() + timeout_s
    for event in events:
        while not event.query():
            if gone():
                raise LocalError("a process of the engine ended", code=ErrorCode.ENGINE_LOST)
            if time.monotonic() > deadline:
                raise LocalError(
                    f"the engine's GPU work was not done within {timeout_s:g} s after it was said "
                    "to be ready",
                    code=ErrorCode.TIMEOUT,
                )
            time.sleep(POLL_S)
