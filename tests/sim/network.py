"""A simulated network, and ZeroMQ's sockets on it, as `kvbus.bus` uses them.

A connection delivers its messages late, in their order. When it breaks, those in flight are lost,
and the client connects again. A cut holds messages between two machines back, until it heals.
Events may be lost one by one, as by a PUB at its high-water mark.
"""

import errno
import itertools
import struct
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import zmq

from tests.sim.world import SimLoop, World

MOST_KEPT = 200
RECONNECT_S, MAX_RECONNECT_S = 0.05, 1.0
IPC_S = 20e-6
_MADE, _LOST = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
_NOT_TAKEN = int(zmq.EVENT_CLOSED)
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)


@dataclass(slots=True, eq=False)
class Process:
    """One simulated process, and its sockets."""

    name: str
    machine: str
    loop: SimLoop
    is_alive: bool = True
    sockets: "list[SimSocket]" = field(default_factory=list)


class SimFrame:
    __slots__ = ("bytes", "more")

    def __init__(self, content: bytes, *, more: bool) -> None:
        self.bytes, self.more = content, more

    def get(self, option: int) -> Any:
        raise zmq.ZMQError(errno.EINVAL)


class Link:
    """A connection between the socket that connected and the one that was bound."""

    def __init__(self, number: int, client: "SimSocket", server: "SimSocket") -> None:
        self.identity = b"\0" + number.to_bytes(4, "big")
        self.client, self.server = client, server
        self.machines = frozenset((client.process.machine, server.process.machine))
        self.is_up = True
        self.free_at = {client: 0.0, server: 0.0}
        """When the last message arrives, by its receiver."""
        self.held: list[tuple[SimSocket, list[bytes]]] = []
        """Messages of a cut."""


class Network:
    """All links, with a mean delay between machines.

    A share ``breaks`` of messages breaks the link, a share ``drops`` of events is lost.
    """

    def __init__(
        self, world: World, *, delay_s: float = 200e-6, breaks: float = 0.0, drops: float = 0.0
    ) -> None:
        self.world, self.delay_s, self.breaks, self.drops = world, delay_s, breaks, drops
        self.bound: dict[str, SimSocket] = {}
        self.links: dict[int, Link] = {}
        self._cuts: set[frozenset[str]] = set()
        self._numbers = itertools.count(1)
        self.num_breaks = 0
        self.sent: deque[bytes] = deque(maxlen=MOST_KEPT)
        """The last frame of each of the last messages."""

    def cut(self, *machines: str) -> None:
        self._cuts.add(frozenset(machines))

    def heal(self, *machines: str) -> None:
        self._cuts.discard(frozenset(machines))
        for link in list(self.links.values()):
            if link.held and link.machines not in self._cuts:
                held, link.held = link.held, []
                for target, frames in held:
                    target.receive(link, frames)

    def is_cut(self, *machines: str) -> bool:
        return frozenset(machines) in self._cuts

    def break_all(self, machine: str) -> None:
        for link in list(self.links.values()):
            if machine in link.machines and len(link.machines) > 1:
                self.break_link(link)

    def end_process(self, process: Process) -> None:
        process.is_alive, process.loop.is_dead = False, True
        for one in list(process.sockets):
            one.close()

    def close(self) -> None:
        self.bound.clear()
        self.links.clear()

    def begin_connecting(self, client: "SimSocket", endpoint: str) -> None:
        delay_s = IPC_S if endpoint.startswith("ipc://") else self.delay_s
        self.world.after(delay_s, self._try, client, endpoint, RECONNECT_S)

    def put(self, link: Link, target: "SimSocket", frames: list[bytes]) -> None:
        self.sent.append(frames[-1])
        world, is_near = self.world, len(link.machines) == 1
        if not is_near and world.luck.chance(self.breaks):
            self.break_link(link)
            return
        at = world.now + (IPC_S if is_near else world.luck.delay_s(self.delay_s))
        at = link.free_at[target] = max(at, link.free_at[target])
        world.after(at - world.now, self._arrive, link, target, frames)

    def break_link(self, link: Link) -> None:
        if not link.is_up:
            return
        link.is_up = False
        self.num_breaks += 1
        del self.links[id(link)]
        link.server.lose(link)
        link.client.lose(link)
        if not link.client.closed:
            self.world.after(RECONNECT_S, self._try, link.client, link.client.peer, RECONNECT_S)

    def _try(self, client: "SimSocket", endpoint: str, retry_s: float) -> None:
        if client.closed or client.peer != endpoint or client.links:
            return
        server = self.bound.get(endpoint)
        machine = server.process.machine if server else endpoint.split("/")[2].partition(":")[0]
        is_cut = self.is_cut(client.process.machine, machine)
        if server is None or server.process.loop.is_frozen or is_cut:
            if server is None and not is_cut:
                client.tell_monitor(_NOT_TAKEN)
            later_s = min(2 * retry_s, MAX_RECONNECT_S)
            self.world.after(retry_s, self._try, client, endpoint, later_s)
            return
        link = Link(next(self._numbers), client, server)
        self.links[id(link)] = link
        server.join(link)
        client.join(link)

    def _arrive(self, link: Link, target: "SimSocket", frames: list[bytes]) -> None:
        if link.is_up and (link.held or link.machines in self._cuts):
            link.held.append((target, frames))
        elif link.is_up:
            target.receive(link, frames)


class SimContext:
    """Makes the sockets of one process; stands for `kvbus.bus.BusContext`."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self._numbers = itertools.count(1)

    def socket(self, kind: int) -> "SimSocket":
        return SimSocket(self, kind, next(self._numbers))

    def probe(self, host: str, port: int) -> Any:
        """Confirm that a connection was refused."""
        return SimpleNamespace(end=lambda: True)

    def is_here(self, host: str) -> bool:
        return host == self.process.machine


class SimSocket:
    """ROUTER, DEALER, XPUB or SUB, or the PAIR of a monitor."""

    def __init__(self, context: SimContext, kind: int, number: int) -> None:
        self.context, self.kind, self._fd = context, kind, number
        self.network, self.process = context.network, context.process
        self.closed = False
        self.endpoint = self.peer = ""
        self.links: dict[bytes, Link] = {}
        self.topics: set[bytes] = set()
        self._monitor: SimSocket | None = None
        self._inbox: deque[SimFrame] = deque()
        self._outgoing: list[bytes] = []
        self.process.sockets.append(self)

    def set(self, option: int, value: Any) -> None:
        """Options change nothing here."""

    def setsockopt(self, option: int, value: Any) -> None:
        if option == zmq.SUBSCRIBE:
            self.topics.add(value)

    def get(self, option: int) -> Any:
        if option == zmq.LAST_ENDPOINT:
            return self.endpoint.encode()
        return (_POLLIN if self._inbox else 0) | (_POLLOUT if self.links else 0)

    def fileno(self) -> int:
        return self._fd

    def bind(self, endpoint: str) -> None:
        if endpoint in self.network.bound:
            raise zmq.ZMQError(errno.EADDRINUSE)
        self.network.bound[endpoint] = self
        self.endpoint = endpoint

    def connect(self, endpoint: str) -> None:
        self.peer = endpoint
        self.network.begin_connecting(self, endpoint)

    def disconnect(self, endpoint: str) -> None:
        self.peer = ""
        self._hang_up()

    def close(self, linger: float | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        if self.endpoint:
            del self.network.bound[self.endpoint]
        self._inbox.clear()  # the remains of a killed process read no more
        self._hang_up()
        self.process.sockets.remove(self)

    def get_monitor_socket(self, _: int) -> "SimSocket":
        self._monitor = self.context.socket(zmq.PAIR)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def send(self, part: bytes, flags: int = 0) -> None:
        self._outgoing.append(part)
        if flags & zmq.SNDMORE:
            return
        frames, self._outgoing = self._outgoing, []
        if self.kind == zmq.ROUTER:
            link = self.links.get(frames[0])
            if link is None:
                raise zmq.ZMQError(errno.EHOSTUNREACH)
            self.network.put(link, link.client, frames[1:])
        elif self.kind == zmq.XPUB:
            self._publish(frames)
        else:
            link = next(iter(self.links.values()), None)
            if link is None:
                raise zmq.Again
            self.network.put(link, link.server, frames)

    def _publish(self, frames: list[bytes]) -> None:
        network, topic = self.network, frames[0]
        for link in list(self.links.values()):
            wanted = any(topic.startswith(one) for one in link.client.topics)
            if wanted and not network.world.luck.chance(network.drops):
                network.put(link, link.client, frames)

    def recv(self, flags: int = 0, copy: bool = True) -> SimFrame:
        if not self._inbox:
            raise zmq.Again
        return self._inbox.popleft()

    def receive(self, link: Link, frames: list[bytes]) -> None:
        if self.closed:
            return
        if self.kind == zmq.ROUTER:
            frames = [link.identity, *frames]
        self._take(frames)

    def join(self, link: Link) -> None:
        self.links[link.identity] = link
        if self.kind == zmq.XPUB:
            for topic in sorted(link.client.topics):
                self._take([b"\1" + topic])
        self.tell_monitor(_MADE)
        self._signal()

    def lose(self, link: Link) -> None:
        self.links.pop(link.identity, None)
        self.tell_monitor(_LOST)

    def tell_monitor(self, event: int) -> None:
        if self._monitor is not None and not self._monitor.closed:
            self._monitor._take([struct.pack("=hi", event, 0), b""])

    def _take(self, frames: list[bytes]) -> None:
        last = len(frames) - 1
        for at, content in enumerate(frames):
            self._inbox.append(SimFrame(content, more=at < last))
        self._signal()

    def _signal(self) -> None:
        if self.process.is_alive:
            self.process.loop.signal(self._fd)

    def _hang_up(self) -> None:
        for link in list(self.links.values()):
            self.network.break_link(link)
