"""Keeps the bounds of all bound TCP sockets of a process, in a thread of its own.

Refuses to rely on the event loop: subscriptions are taken in by the very call that sends an event,
and a stream of them holds that call, and so the loop, until its connection is ended.

    accept ──▶ monitor of the socket ──▶ Door.enter: too many? ──▶ shut down
    something comes, at most every 50 ms; or a second has passed:
        TCP_INFO of those connections, or of all ──▶ Door.check: too much? ──▶ shut down
        what the loop has handed out and sent ─────────┘

A message may have frames without end, and ZeroMQ keeps them all until the last one has come:
no option bounds that. What the kernel has received and the loop has not been given shows it.
An idle process costs nothing but a look a second.
"""

import math
import os
import resource
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbus.bus.accepted import Accepted
from kvbus.bus.door import Door, DoorLimits, Ended
from kvbus.bus.sockets import BusContext, Socket
from kvbus.bus.traffic import Traffic

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)
_REST_S, _LOOK_S = 0.05, 1.0
_MAX_RESERVE, _RESERVED_PART = 256, 4
_NUM_SPARE = 8
_NUM_FREE, _NUM_RECOVERED = 4, 32

OnEnded = Callable[[str, Ended, int], None]
"""Name of the socket, one of those that were ended, and how many for the same reason."""


class ConnectionGuard:
    """`watch` sockets before they are bound, and `start`; `close` before the context ends.

    All callbacks come in the guard's thread: ``on_short`` when the process has no descriptors left,
    and when it has some again, ``on_broken`` when the guard has ended by a defect.
    """

    def __init__(
        self,
        context: BusContext,
        *,
        on_ended: OnEnded,
        on_short: Callable[[bool], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._context = context
        self._on_ended, self._on_short, self._on_broken = on_ended, on_short, on_broken
        self._new: deque[tuple[Socket, Door]] = deque()
        self._monitors: dict[Socket, Door] = {}
        self._num_watched = 0
        self._looks_at = 0.0
        self._spares, self._poller = _Spares(), zmq.Poller()
        self._arrivals = _Arrivals()
        self.num_ended: Counter[str] = Counter()
        self._fd_bound = _fd_bound()
        self._stopping = threading.Event()
        self._wakes, self._wakened = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvbus-guard", daemon=True)

    @property
    def num_connections(self) -> int:
        """How many connections all sockets have."""
        return sum(len(door) for door in list(self._monitors.values()))

    def watch(self, socket: Socket, name: str, limits: DoorLimits) -> Traffic:
        """Watch a socket that is not bound yet, until it closes; its owner counts what passes."""
        self._num_watched += 1
        endpoint = f"inproc://guard-{id(self)}-{self._num_watched}"
        socket.monitor(endpoint, _EVENTS)
        monitor: Socket = self._context.socket(zmq.PAIR)
        monitor.connect(endpoint)
        door = Door(name, limits, has_keys=socket.get(zmq.MECHANISM) == zmq.CURVE)
        self._new.append((monitor, door))
        self._wake()
        return door.traffic

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and wait for it; idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._take_new()
        for monitor, door in self._monitors.items():
            door.close()  # else the collector closes its descriptors, which are not ours
            monitor.close(linger=0)
        self._spares.close()
        self._arrivals.close()
        os.close(self._wakes)
        os.close(self._wakened)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is full: it wakes anyway
            os.write(self._wakened, b"x")

    def _take_new(self) -> None:
        while self._new:
            monitor, door = self._new.popleft()
            self._monitors[monitor] = door
            self._poller.register(monitor, zmq.POLLIN)

    def _run(self) -> None:
        try:
            self._watch_all()
        except Exception as error:  # without the guard there are no bounds: its owner must know
            self._on_broken(error)

    def _watch_all(self) -> None:
        self._poller.register(self._wakes, zmq.POLLIN)
        rests_until = 0.0
        while not self._stopping.is_set():
            self._take_new()
            rests = (now := time.monotonic()) < rests_until
            ready = self._poll((rests_until if rests else self._looks_at) - now, arrivals=not rests)
            for monitor, door in list(self._monitors.items()):
                if monitor in ready:
                    self._hear(monitor, door)
            if (now := time.monotonic()) < rests_until:
                continue
            if now >= self._looks_at:
                self._look(now)
            elif arrived := self._arrivals.take():
                self._check(now, arrived)
            else:
                continue
            rests_until = now + _REST_S

    def _poll(self, timeout_s: float, *, arrivals: bool) -> Mapping[object, int]:
        """What has something to say within ``timeout_s``; ``arrivals`` of bytes only if asked."""
        self._poller.register(self._arrivals, zmq.POLLIN if arrivals else 0)
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if self._wakes in ready:
            os.read(self._wakes, 64)
        return ready

    def _hear(self, monitor: Socket, door: Door) -> None:
        ended = []
        with suppress(zmq.Again):
            for _ in range(1000):
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                if event["event"] == zmq.EVENT_ACCEPTED:
                    ended.append(self._enter(door, int(event["value"])))
                elif event["event"] == zmq.EVENT_ACCEPT_FAILED:
                    self._looks_at = 0.0  # there may be no descriptor left
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    door.leave(int(event["value"]))
                elif event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    self._forget(monitor)
                    return
        self._tell(door, [one for one in ended if one is not None])

    def _forget(self, monitor: Socket) -> None:
        """The socket was closed, and all its connections with it."""
        self._poller.unregister(monitor)
        self._monitors.pop(monitor).close()
        monitor.close(linger=0)

    def _enter(self, door: Door, fd: int) -> Ended | None:
        try:
            connection = Accepted(fd, time.monotonic())
        except OSError:  # it has ended already
            return None
        self._arrivals.add(fd)
        return door.enter(connection, fd_bound=0 if self._spares.short else self._fd_bound)

    def _look(self, now: float) -> None:
        """At all connections, and whether there are descriptors."""
        self._check(now)
        if self._spares.look():
            self._on_short(self._spares.short)
        self._looks_at = now + (_REST_S if self._spares.short else _LOOK_S)

    def _check(self, now: float, fds: Collection[int] | None = None) -> None:
        for door in self._monitors.values():
            self._tell(door, door.check(now, fds))

    def _tell(self, door: Door, ended: list[Ended]) -> None:
        for reason, num in Counter(one.reason for one in ended).items():
            self.num_ended[reason] += num
            self._on_ended(door.name, next(e for e in ended if e.reason is reason), num)


def _fd_bound() -> int:
    """The number from which on a descriptor is not for connections of strangers.

    The kernel gives the lowest number that is free, so a high one says that few are left.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most - min(_MAX_RESERVE, most // _RESERVED_PART)


# ZeroMQ reads what comes at once, and epoll does not tell of bytes that are gone when it is asked.
# So it is asked for room to write as well, which there is nearly always: what comes is then told in
# any case. Where there is none, and so in the worst case, the next look finds what has come.
class _Arrivals:
    """The connections by which something has come; ZeroMQ closes them, and they are forgotten."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Readable when something may have come."""
        return self._epoll.fileno()

    def add(self, fd: int) -> None:
        """Tell of this connection too; where that cannot be, the next look has to do."""
        with suppress(OSError):
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)

    def take(self) -> set[int]:
        """Those of which was not told yet."""
        return {fd for fd, _ in self._epoll.poll(0)}

    def close(self) -> None:
        """Tell no more."""
        self._epoll.close()


# When all descriptors are taken, ZeroMQ can neither accept a connection nor turn it away: it tries
# again and again, with a whole core. So a few are held, and let go then: the connections that
# wait are accepted, and ended at once, and the thread of ZeroMQ has peace.
class _Spares:
    """Descriptors that nobody uses; ``short`` while there are too few to hold any."""

    def __init__(self) -> None:
        self.short = False
        self._held: list[int] = []
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.look()

    def look(self) -> bool:
        """Whether descriptors ran out, or came back, since the last look."""
        was_short = self.short
        wanted = _NUM_RECOVERED if was_short else _NUM_FREE
        probes = self._open(wanted)
        self.short = len(probes) < wanted
        for probe in probes:
            os.close(probe)
        if self.short:
            self.release()
        else:
            self._held += self._open(_NUM_SPARE - len(self._held))
        return self.short != was_short

    def close(self) -> None:
        """Let go of everything."""
        self.release()
        os.close(self._null)

    def release(self) -> None:
        """Let go of all of them."""
        while self._held:
            os.close(self._held.pop())

    def _open(self, wanted: int) -> list[int]:
        opened: list[int] = []
        with suppress(OSError):
            while len(opened) < wanted:
                opened.append(os.dup(self._null))
        return opened
