"""Notes of one process: what happened, and when by the clock that all processes of a machine share.

The functions of `PLACES` are wrapped while it records, so nothing is there when it does not.

    python -m kvbus.bench.trace.recorder NOTES MODULE [ARGUMENT ...]

runs a module as ``python -m MODULE`` does, and writes the file NOTES when that has ended.
"""

import functools
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from kvbus.bus import EventPublisher, RequestClient, RequestServer, Session
from kvbus.protocol.envelope import Notice
from kvbus.table import Driver
from kvbus.table.events import DeadlinePassed
from kvbus.transport import Transport
from kvbus.transport.nixl_agent import NixlAgent
from kvbus.transport.scheduler import ReadScheduler

Note = tuple[int, str]
"""Nanoseconds of CLOCK_MONOTONIC, and what happened."""
QUIET_OPS = ("ping", "heartbeat")
"""They belong to no handoff."""


@dataclass(frozen=True, slots=True)
class Place:
    """A method that is noted when it begins, or once it has ended, by what ``name`` says of it."""

    owner: type[Any]
    method: str
    name: Callable[..., str | None]
    ended: bool = False


def _settled(client: Any, request_id: int, _outcome: object) -> str | None:
    pending = client._pending.get(request_id)
    return None if pending is None else _of_op(pending.message.op, "reply read")


def _noticed(_: object, _callback: object, argument: object) -> str | None:
    return f"{argument.op}: notice read" if isinstance(argument, Notice) else None


def _of_op(op: str, what: str) -> str | None:
    return None if op in QUIET_OPS else f"{op}: {what}"


def _event(driver: Any, event: object) -> str | None:
    table = type(driver._table).__name__
    return None if isinstance(event, DeadlinePassed) else f"{table}: {type(event).__name__}"


PLACES = (
    Place(RequestClient, "send", lambda _, message, **__: _of_op(message.op, "sent")),
    Place(RequestClient, "_settle", _settled),
    Place(RequestClient, "_call_user", _noticed),
    Place(RequestServer, "_begin", lambda _, __, request: _of_op(request.op, "read")),
    Place(RequestServer, "answer", lambda _, call, __: _of_op(call.op, "answered")),
    Place(Session, "notify", lambda _, op, *__: _of_op(op, "notice sent")),
    Place(EventPublisher, "publish", lambda _, op, __: _of_op(op, "event sent")),
    Place(Driver, "dispatch", _event),
    Place(Transport, "read", lambda *_, **__: "READ: asked for"),
    Place(NixlAgent, "prepare", lambda *_: "READ: prepared"),
    Place(NixlAgent, "post", lambda *_: "READ: posted", ended=True),
    Place(ReadScheduler, "_finish", lambda *_: "READ: landed"),
)


class Recorder:
    """What happened so far, of any thread."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def note(self, what: str) -> None:
        """It happened now."""
        self.notes.append((time.monotonic_ns(), what))

    @contextmanager
    def recording(self, places: Sequence[Place] = PLACES) -> Iterator[None]:
        """Note each call of ``places`` until the block ends."""
        before = [getattr(place.owner, place.method) for place in places]
        for place, method in zip(places, before, strict=True):
            setattr(place.owner, place.method, self._noted(place, method))
        try:
            yield
        finally:
            for place, method in zip(places, before, strict=True):
                setattr(place.owner, place.method, method)

    def _noted(self, place: Place, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(*arguments: Any, **keywords: Any) -> Any:
            what = place.name(*arguments, **keywords)
            if what is not None and not place.ended:
                self.note(what)
            result = method(*arguments, **keywords)
            if what is not None and place.ended:
                self.note(what)
            return result

        return noted


def record_module(notes: Path, module: str, *arguments: str) -> None:
    """Run a module as a program, and write what happened when it has ended."""
    recorder, leave = Recorder(), os._exit

    def write_and_leave(status: int) -> NoReturn:
        notes.write_bytes(msgspec.json.encode(recorder.notes))
        leave(status)

    os._exit = write_and_leave  # agents end by it
    sys.argv = [module, *arguments]
    try:
        with recorder.recording():
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        notes.write_bytes(msgspec.json.encode(recorder.notes))


def read_notes(notes: Path) -> list[Note]:
    """What `record_module` wrote."""
    return msgspec.json.decode(notes.read_bytes(), type=list[Note])


if __name__ == "__main__":
    record_module(Path(sys.argv[1]), *sys.argv[2:])
