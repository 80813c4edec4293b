"""Data process as seen by the control process.

If it crashes, its requests fail, and the next data process gets all definitions again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio
from msgspec import structs

from kvbus.data import messages as wire
from kvbus.errors import ClosedError, ErrorCode, KVBusError, LocalError, TransferFailed

MAX_JOBS = 16_384
LIVED_S = 30.0
"""A data process that lived this long is restarted without a pause."""
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)

OnReply = Callable[[wire.DataReply], object]
ProgressToken = ExitStack
"""Demand for progress, for peers that connect and read, until it is closed."""


class DataProcessHandle(Protocol):
    @property
    def pid(self) -> int: ...

    def send(self, message: wire.ToData, fds: Sequence[int] = ()) -> None: ...

    def kill(self) -> None: ...


OnMessage = Callable[[wire.FromData], None]
OnExit = Callable[[str], None]
"""Called after the last message. No write of the process can land any more."""
Spawn = Callable[[str, OnMessage, OnExit], DataProcessHandle]


@dataclass(slots=True, eq=False)
class Defined:
    """Object that jobs name. ``fds`` stay open while it may be defined again."""

    add: wire.ToData
    remove: wire.ToData | None = None
    needs: tuple[Defined, ...] = ()
    fds: Sequence[int] = ()
    num_jobs: int = 0
    is_removed: bool = False
    is_discarded: bool = False
    is_answered: bool = False
    result: wire.Result | None = None
    error: KVBusError | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def number(self) -> int:
        match self.add:
            case wire.AddMemory() | wire.AddRemote():
                return self.add.memory
            case wire.AddPlan():
                return self.add.plan
        raise TypeError(f"{type(self.add).__name__} defines nothing with a number")

    def closure(self) -> Iterator[Defined]:
        for one in self.needs:
            yield from one.closure()
        yield self


@dataclass(slots=True, eq=False)
class StartedJob:
    on_reply: OnReply
    uses: tuple[Defined, ...]
    is_aborted: bool = False
    abort: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class DataStatus:
    pid: int
    boot: str
    num_restarts: int
    last_end: str
    problem: str


class DataProcess:
    def __init__(
        self,
        spawn: Spawn,
        *,
        new_boot: Callable[[], str],
        name: str,
        slice_bytes: int,
        copy_threads: int,
        backends: wire.Backends = wire.UCX_ONLY,
        on_change: Callable[[], object] = lambda: None,
        on_cut: Callable[[wire.Cut], object] = lambda _: None,
        on_log: Callable[[wire.Log], object] = lambda _: None,
    ) -> None:
        self._spawn, self._new_boot, self._name = spawn, new_boot, name
        self._configure = wire.Configure(
            nixl_name="",
            slice_bytes=slice_bytes,
            copy_threads=copy_threads,
            nixl_backends=backends,
        )
        self.on_change, self.on_cut, self.on_log = on_change, on_cut, on_log
        self.slice_bytes, self.backends = slice_bytes, tuple(backends)
        self._child: DataProcessHandle | None = None
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self._pending: dict[int, OnReply] = {}
        self._jobs: dict[int, StartedJob] = {}
        self._kept: dict[Defined, None] = {}
        self._known: dict[Defined, None] = {}
        self._num_progress = 0
        self._is_open = self.is_closing = self._is_replacing = False
        self._ended, self._started = anyio.Event(), anyio.Event()
        self.boot = ""
        self.num_restarts, self.last_end, self.problem = 0, "", "it has not been started"
        self.num_replaced = 0
        self._killed_for, self.was_replaced = "", False
        self.nixl_error: KVBusError | None = None

    @property
    def nixl_name(self) -> str:
        return f"{self._name}-{self.boot}"

    @property
    def is_running(self) -> bool:
        return self._child is not None and not self._is_replacing

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_progress(self) -> int:
        return self._num_progress

    def status(self) -> DataStatus:
        pid = self._child.pid if self._child is not None else 0
        return DataStatus(pid, self.boot, self.num_restarts, self.last_end, self.problem)

    def new_number(self) -> int:
        return next(self._numbers)

    # Lifecycle.

    async def run(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while not self.is_closing:
            began = loop.time()
            self._ended = anyio.Event()
            try:
                self.start_one()
            except OSError as error:
                self._note_end(f"cannot be started: {error.strerror}")
                self.on_change()
            else:
                await self._ended.wait()
            if self.is_closing:
                return
            failures = 0 if loop.time() - began >= LIVED_S else failures + 1
            await anyio.sleep(PAUSES_S[min(failures - 1, len(PAUSES_S) - 1)] if failures else 0.0)
            self.num_restarts += 1

    def start_one(self) -> None:
        self.boot = boot = self._new_boot()
        try:
            self._child = self._spawn(boot, partial(self._receive, boot), partial(self._end, boot))
        except OSError:
            self.boot = ""
            raise
        self._is_replacing, self.problem = False, ""
        self._started.set()
        self._send(structs.replace(self._configure, nixl_name=self.nixl_name), lambda _: None)
        if self._is_open:
            self._send(wire.OpenNixl(), self._note_opened)
        for defined in self._kept:
            self._define(defined)
        if self._num_progress:
            self._send_progress()
        self.on_change()

    async def replace(self, reason: str, *, grace_s: float) -> None:
        """Kill the data process because aborted jobs do not end; others get ``grace_s``."""
        if not self.is_running:
            return
        boot, self._is_replacing = self.boot, True
        self._note_not_running()
        self.problem, self.num_replaced = reason, self.num_replaced + 1
        with anyio.move_on_after(grace_s):
            while any(not job.is_aborted for job in self._jobs.values()):  # noqa: ASYNC110 - rare
                await anyio.sleep(0.02)
        if self.boot == boot:
            self.kill(reason)

    async def until_running(self) -> None:
        while not self.is_running:
            await self._started.wait()

    def kill(self, reason: str) -> None:
        if self._child is not None:
            self._killed_for = reason
            self._child.kill()

    async def close(self) -> None:
        self.is_closing = True
        if self._child is not None:
            self._child.kill()
            await self._ended.wait()

    # Requests.

    async def open_nixl(self) -> None:
        self._is_open, boot = True, self.boot
        if self._num_progress:
            self._send_progress()
        try:
            await self.call(wire.OpenNixl())
        except KVBusError as error:
            if self.boot == boot:
                self.nixl_error = error
            raise
        self.nixl_error = None

    @property
    def is_open(self) -> bool:
        return self._is_open

    def _note_opened(self, reply: wire.DataReply) -> None:
        self.nixl_error = reply.failure()

    async def call(self, message: wire.ToData, fds: Sequence[int] = ()) -> wire.DataReply:
        self._check_running()
        return await self._request(message, fds)

    async def _request(self, message: wire.ToData, fds: Sequence[int] = ()) -> wire.DataReply:
        future: asyncio.Future[wire.DataReply] = asyncio.get_running_loop().create_future()

        def settle(reply: wire.DataReply) -> None:
            if not future.done():
                future.set_result(reply)

        self._send(message, settle, fds)
        reply = await future
        if (error := reply.failure()) is not None:
            raise error
        return reply

    async def define(self, defined: Defined) -> wire.Result | None:
        """Define an object now and in each later data process. Raises `KVBusError`."""
        self._kept[defined], defined.is_removed = None, False
        try:
            return await self.result(defined)
        except BaseException:
            self.remove(defined)
            raise

    async def result(self, defined: Defined) -> wire.Result | None:
        """Raises `KVBusError`. Without a data process, only kept objects wait for the next one."""
        if any(one.is_discarded for one in defined.closure()):
            raise _gone()  # its descriptors may be closed, and their numbers reused
        if not defined.is_answered:
            if defined not in self._kept:
                self._check_running()
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            defined.waiters.append(future)
            if self.is_running:
                for one in defined.closure():
                    self._define(one)
            await future
        if defined.error is not None:
            raise defined.error
        if defined.is_discarded:
            raise _gone()
        if defined.is_removed:  # e.g. the peer's process ended: a retry may find it
            raise TransferFailed("what this needs was dropped while it was defined")
        return defined.result

    async def discard(self, defined: Defined) -> None:
        """Abort the jobs that use a memory, and zero its bytes; its descriptors may be closed."""
        self._kept.pop(defined, None)
        defined.is_discarded = True
        _settle(defined)
        for job in [job for job in self._jobs.values() if defined in job.uses]:
            job.abort()
        if defined in self._known and isinstance(defined.add, wire.AddMemory):
            with suppress(TransferFailed):  # a data process that ended has no bytes
                await self._request(wire.DiscardMemory(memory=defined.add.memory))

    def remove(self, defined: Defined) -> None:
        self._kept.pop(defined, None)
        defined.is_removed = True
        _settle(defined)
        if not defined.num_jobs:
            self._undefine(defined)

    def knows(self, defined: Defined) -> bool:
        return defined in self._known

    def redefine(self, defined: Defined) -> None:
        """Define an object again before the next job that uses it."""
        self._undefine(defined)
        defined.is_answered = False

    def start(
        self, message: wire.Job, on_reply: OnReply, *, uses: Iterable[Defined] = ()
    ) -> StartedJob:
        """``on_reply`` is called once, after this returns. Raises `TransferFailed`."""
        self._check_running()
        if len(self._jobs) >= MAX_JOBS:
            raise LocalError(
                f"{len(self._jobs)} jobs are in flight, which is the limit", code=ErrorCode.BUSY
            )
        needed = tuple(dict.fromkeys(one for used in uses for one in used.closure()))
        if any(one.is_discarded for one in needed):
            raise _gone()
        for one in needed:
            self._define(one)
        job = StartedJob(on_reply, needed)
        number = self._send(message, lambda reply: self._end_job(number, reply))
        for one in needed:
            one.num_jobs += 1
        self._jobs[number] = job
        job.abort = partial(self._abort, number)
        return job

    def drive_progress(self) -> ProgressToken:
        token = ProgressToken()
        token.callback(self._end_progress)
        self._num_progress += 1
        if self._num_progress == 1:
            self._send_progress()
        return token

    def _end_progress(self) -> None:
        self._num_progress -= 1
        if not self._num_progress:
            self._send_progress()

    def _send_progress(self) -> None:
        if self._is_open and self._child is not None:
            self._send(wire.DriveProgress(on=self._num_progress > 0), lambda _: None)

    def _abort(self, number: int) -> None:
        job = self._jobs.get(number)
        if job is not None and not job.is_aborted:
            job.is_aborted = True
            if self._child is not None:
                self._send(wire.AbortJob(job=number), lambda _: None)

    def _check_running(self) -> None:
        if not self.is_running:
            raise self._not_running()

    def _not_running(self) -> TransferFailed:
        return TransferFailed(f"the data process is not running: {self.problem}")

    def _define(self, defined: Defined) -> None:
        def take(reply: wire.DataReply) -> None:
            has_ended = self._child is None
            if has_ended and defined in self._kept:
                return  # the next data process gets it again
            defined.is_answered, defined.result = not has_ended, reply.result
            defined.error = reply.failure()
            _settle(defined)

        if defined not in self._known:
            self._known[defined] = None
            defined.error = None
            self._send(defined.add, take, defined.fds)

    def _undefine(self, defined: Defined) -> None:
        if defined in self._known:
            del self._known[defined]
            if defined.remove is not None and self._child is not None:
                self._send(defined.remove, lambda _: None)

    def _send(self, message: wire.ToData, on_reply: OnReply, fds: Sequence[int] = ()) -> int:
        number = next(self._ids)
        self._pending[number] = on_reply
        if self._child is not None:
            try:
                self._child.send(structs.replace(message, id=number), fds)
            except ClosedError:
                self._child.kill()  # its end follows, and fails the request
            except BaseException:
                del self._pending[number]
                raise
        return number

    # Replies, and the end of a process. The child delivers all received replies before it reports
    # the end, so a completed job succeeds.

    def _receive(self, boot: str, message: wire.FromData) -> None:
        if boot != self.boot:
            return
        match message:
            case wire.DataReply():
                on_reply = self._pending.pop(message.to, None)
                if on_reply is not None:
                    on_reply(message)
            case wire.Cut():
                self.on_cut(message)
            case wire.Log():
                self.on_log(message)

    def _end_job(self, number: int, reply: wire.DataReply) -> None:
        job = self._jobs.pop(number)
        for one in reversed(job.uses):
            one.num_jobs -= 1
            if one.is_removed and not one.num_jobs:
                self._undefine(one)
        job.on_reply(reply)

    def _end(self, boot: str, reason: str) -> None:
        if boot != self.boot:
            return
        self.was_replaced = bool(self._killed_for)
        reason, self._killed_for = self._killed_for or reason, ""
        self._note_end(reason)
        failure = wire.Failure.of(TransferFailed(f"the data process ended: {reason}"))
        pending, self._pending = self._pending, {}
        for number, on_reply in pending.items():
            on_reply(wire.DataReply(to=number, error=failure))
        self.on_change()
        self._ended.set()

    def _note_not_running(self) -> None:
        if self._started.is_set():
            self._started = anyio.Event()

    def _note_end(self, reason: str) -> None:
        self._child, self.boot = None, ""
        self._note_not_running()
        self.last_end = self.problem = reason
        self.nixl_error = None
        for defined in self._known:
            defined.is_answered, defined.result, defined.error = False, None, None
        self._known.clear()


def _settle(defined: Defined) -> None:
    waiters, defined.waiters = defined.waiters, []
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _gone() -> LocalError:
    return LocalError("the memory is not there any more", code=ErrorCode.ENGINE_LOST)
