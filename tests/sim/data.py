"""A simulated data process: the product's `DataServer`, on virtual time, with a simulated NIXL.

Its messages take time and keep their order. It may die at each of them, and at each step of its
threads. Its earlier messages arrive, then its end is reported, and none of its READs lands later.
Each request gets one reply, or the end of the process.
"""

import gc
import itertools
import os
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from kvbus.data import messages as wire
from kvbus.data.client import DataProcess, Defined, OnExit, OnMessage, OnReply, StartedJob
from kvbus.data.server import DataServer
from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.mapping import OwnedMemory
from tests.sim.network import Network, Process
from tests.sim.nixl import Fabric, SimNixl
from tests.sim.world import Violation, World

MAX_MESSAGES_A_TURN = 64
TURN_S, KILL_S = 5e-6, 2e-3
SLICE_BYTES = 256

_encode = msgspec.msgpack.Encoder().encode
_to_data, _from_data = (msgspec.msgpack.Decoder(kind) for kind in (wire.ToData, wire.FromData))


@dataclass(slots=True, eq=False, kw_only=True)
class Machines:
    """What data processes have in common; they die at a share ``dies`` of messages and steps."""

    network: Network
    fabric: Fabric
    message_s: float = 30e-6
    start_s: float = 0.03
    dies: float = 0.0
    changed_at: float = 0.0
    """When the last one started or died."""
    pids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1000))

    @property
    def world(self) -> World:
        return self.network.world


class _Killed(BaseException):
    """Unwinds the data process, whose code would catch an `Exception`."""


class SimChild:
    """One data process of an agent; it stands for `kvbus.data.child`'s."""

    def __init__(
        self, machines: Machines, process: Process, place: str, on_message: Any, on_exit: OnExit
    ) -> None:
        self.pid = next(machines.pids)
        self.machine, self.place = process.machine, place
        self.is_alive, self.is_frozen = True, False
        self.nixl: SimNixl | None = None
        self.unanswered: dict[int, str] = {}
        """Requests that have no reply yet, by their numbers."""
        self._process, self._machines, self.world = process, machines, machines.world
        self._on_message, self._on_exit = on_message, on_exit
        self._server: DataServer | None = None
        self._inbox: deque[tuple[bytes, list[int]]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._late: list[Callable[[], None]] = []
        """Calls of threads while it is frozen."""
        self._starts_at = self.world.now + self.world.luck.delay_s(machines.start_s)
        machines.changed_at = self._starts_at
        self._to_data_at = self._to_control_at = self.world.now
        self._turn_at: float | None = None

    def send(self, message: wire.ToData, fds: Sequence[int] = ()) -> None:
        self.unanswered[message.id] = type(message).__name__
        sent = _encode(message), [os.dup(fd) for fd in fds]
        self._to_data_at = max(self.world.now + self._delay_s(), self._to_data_at)
        self.world.after(self._to_data_at - self.world.now, self._arrive, *sent)

    def kill(self) -> None:
        self.world.after(self.world.luck.delay_s(KILL_S), self.die, "killed by SIGKILL")

    def die(self, reason: str) -> None:
        """End it now; what it had sent arrives before the report of its end."""
        if not self.is_alive:
            return
        self.is_alive, self._server = False, None
        self._machines.changed_at = self.world.now
        for _, fds in self._inbox:
            _close(fds)
        self._inbox.clear()
        self._calls.clear()
        self._late.clear()
        self._tell_control(self._on_exit, reason)

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        if self.is_frozen and self.is_alive:
            self.is_frozen = False
            late, self._late = self._late, []
            for call in late:
                self.world.after(0.0, self._do, call)
            self._wake(0.0)

    @property
    def is_driven(self) -> bool:
        return self._server is not None and self._server.pause_s() is not None

    def on_moved(self) -> None:
        """Have the next poll of its main thread find it; there is none without a pause."""
        pause_s = None if self._server is None else self._server.pause_s()
        if pause_s is not None:
            self._wake(self.world.luck.uniform(0.0, pause_s))

    # The main thread, as `kvbus.data.loop`: messages, calls of threads, a step. One that would
    # find nothing is left out.

    def _wake(self, after_s: float) -> None:
        at = max(self.world.now + after_s, self._starts_at)
        if self._turn_at is None or at < self._turn_at:
            self._turn_at = at
            self.world.after(at - self.world.now, self._begin_turn, at)

    def _begin_turn(self, at: float) -> None:
        if at == self._turn_at:
            self._turn_at = None
            if not self.is_frozen:
                self._do(self._turn)

    def _turn(self) -> None:
        while self._calls:
            self._calls.popleft()()
        for _ in range(MAX_MESSAGES_A_TURN):
            if not self._inbox:
                break
            body, fds = self._inbox.popleft()
            self._handle(_to_data.decode(body), fds)
        before = 0 if self.nixl is None else self.nixl.num_moves
        if self._server is not None:
            self._server.step()
        if self._inbox or self._calls or (self.nixl is not None and self.nixl.num_moves > before):
            self._wake(TURN_S)

    def _handle(self, message: wire.ToData, fds: list[int]) -> None:
        self._may_die()
        if self._server is not None:
            self._server.handle(message, fds)
            self._may_die()
            return
        assert isinstance(message, wire.Configure)
        self._server = DataServer(
            structs.replace(message, slice_bytes=SLICE_BYTES),
            load_nixl=lambda _: self._open_nixl,
            send=self._send,
            post=self._post,
            new_threads=partial(_Threads, self),
            clock=self._process.loop.time,
            bus_errors=BusErrors(),
        )

    def _open_nixl(self, name: str) -> SimNixl:
        self.nixl = SimNixl(self._machines.fabric, self, name, self.place)
        return self.nixl

    def _post(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self._wake(0.0)

    def _send(self, message: wire.FromData) -> None:
        self._may_die()
        if isinstance(message, wire.DataReply) and self.unanswered.pop(message.to, None) is None:
            self.world.fail(f"{self._process.name}: request {message.to} has a second reply")
        self._tell_control(self._on_message, _from_data.decode(_encode(message)))
        self._may_die()

    def start(self, call: Callable[[], object], after_s: float) -> None:
        """Have a thread call it then."""
        self.world.after(after_s, self._do, partial(self._in_thread, call))

    def _in_thread(self, call: Callable[[], object]) -> None:
        self._may_die()
        call()
        self._may_die()

    def _do(self, call: Callable[[], object]) -> None:
        if self.is_alive and self.is_frozen:
            self._late.append(partial(self._do, call))
        elif self.is_alive:
            self._call(call)

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except _Killed:
            self.die("killed by SIGABRT")
        except Violation:
            raise
        except Exception:
            self.world.fail(f"{self._process.name}: a thread ended:\n{traceback.format_exc()}")

    def _may_die(self) -> None:
        if self.world.luck.chance(self._machines.dies):
            raise _Killed

    def _arrive(self, body: bytes, fds: list[int]) -> None:
        if self.is_alive:
            self._inbox.append((body, fds))
            self._wake(0.0)
        else:
            _close(fds)

    def _tell_control(self, call: Callable[..., object], *args: Any) -> None:
        loop = self._process.loop
        self._to_control_at = max(self.world.now + self._delay_s(), self._to_control_at)
        self.world.after(self._to_control_at - self.world.now, loop.call_soon, call, *args)

    def _delay_s(self) -> float:
        return self.world.luck.delay_s(self._machines.message_s)


class _Threads(Executor):
    """Threads of a data process."""

    def __init__(self, child: SimChild, number: int, name: str) -> None:
        self._child, self._copies = child, name == "kvbus-copy"
        self._free_at = [0.0] * number

    def submit(  # type: ignore[override]  # nobody waits for what it returns
        self, fn: Callable[..., object], *args: Any, **kwargs: Any
    ) -> "Future[Any]":
        world, child = self._child.world, self._child
        if self._copies and world.lacks_memory():
            raise MemoryError
        thread = self._free_at.index(min(self._free_at))
        begins_at = max(self._free_at[thread], world.now)
        self._free_at[thread] = begins_at + world.luck.delay_s(world.thread_s)
        child.start(partial(fn, *args, **kwargs), self._free_at[thread] - world.now)
        return Future()


class SimData(DataProcess):
    """The data processes of one agent; it checks that each job is reported exactly once."""

    child: SimChild | None = None

    def __init__(self, machines: Machines, process: Process, **options: Any) -> None:
        self._machines, self._process = machines, process
        self.is_forbidden = False
        """Whether no data process can be started."""
        super().__init__(self._spawn_one, **options)

    def _spawn_one(self, boot: str, on_message: OnMessage, on_exit: OnExit) -> SimChild:
        if self.is_forbidden or not self._process.is_alive:
            raise OSError("no more processes")

        def end(reason: str) -> None:
            on_exit(reason)
            if self.num_jobs:
                self._world.fail(f"{self._process.name}: jobs outlive their data process")

        before = "" if self.child is None else self.child.place
        place = self._machines.fabric.place(self._process.machine, before)
        self.child = SimChild(self._machines, self._process, place, on_message, end)
        return self.child

    def start(
        self, message: wire.Job, on_reply: OnReply, *, uses: Iterable[Defined] = ()
    ) -> StartedJob:
        has_returned = has_reply = False

        def check(reply: wire.DataReply) -> None:
            nonlocal has_reply
            if has_reply or not has_returned:
                self._world.fail(f"{self._process.name}: a job was reported twice, or too early")
            has_reply = True
            on_reply(reply)

        started = super().start(message, check, uses=uses)
        has_returned = True
        return started

    @property
    def _world(self) -> World:
        return self._machines.world


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def memory_files() -> set[int]:
    """The descriptors of this process for memory of engines and agents."""
    links = {one: one.readlink() for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
    return {int(one.name) for one, at in links.items() if str(at).startswith("/memfd:kvbus")}


@contextmanager
def remains_released() -> Iterator[None]:
    """Release what killed processes had, as the kernel would: it goes with no warning."""
    gc.collect()  # frozen, pipes of the last world would stay open
    gc.freeze()  # no collection scans older objects when this world ends
    before = memory_files()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            # the frames of an error may hold them for longer than this
            for one in gc.get_objects():
                if issubclass(type(one), OwnedMemory):
                    one.close()
            gc.collect()
            for descriptor in memory_files() - before:
                os.close(descriptor)
