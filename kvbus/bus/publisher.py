"""The sending end of events: a PUB that numbers each topic and beats.

Refuses to wait or to keep: ZeroMQ drops silently for a subscriber that is ``hwm`` messages behind.
The subscriber sees it by the seqs, those in heartbeats included.
"""

import asyncio
from collections.abc import Callable

import zmq

from kvbus.bus.actor import SocketActor
from kvbus.bus.sockets import (
    BusContext,
    SocketOptions,
    bound_endpoint,
    descriptor_of,
    open_publisher,
)
from kvbus.errors import ConfigError, LocalError
from kvbus.protocol.envelope import encode_notice
from kvbus.protocol.events import Heartbeat
from kvbus.protocol.message import Message

_BIND_AGAIN_S = 0.02
MAX_TOPICS = 256
_BATCH = 64


class EventPublisher(SocketActor):
    """Events of one process: frames ``[op, event]``, with a seq from 1 for each op.

    To anyone, or with ``options.curve`` to those whose keys are let in.
    """

    def __init__(
        self,
        context: BusContext,
        endpoint: str,
        *,
        boot: str,
        heartbeat_s: float = 1.0,
        options: SocketOptions | None = None,
    ) -> None:
        super().__init__()
        self.boot = boot
        self._heartbeat_s = heartbeat_s
        self._seqs: dict[str, int] = {}
        self._num_heartbeats = 0
        self.count_reads: Callable[[], int] = _none
        """How many reads of what the process has are under way, for heartbeats."""
        self._context, self._options = context, options or SocketOptions()
        self._socket: _EventSocket | None = self._bind(endpoint)
        self.endpoint = self._socket.endpoint

    def publish(self, op: str, message: Message) -> int:
        """Send an event; returns its seq among the events of this ``op``. Dropped once closed.

        It is not even encoded when nobody has subscribed to it.
        """
        if op == Heartbeat.op:
            raise LocalError("the heartbeat topic is the publisher's own")
        seq = self._seqs[op] = self._seqs.get(op, 0) + 1
        if self._socket is not None and self._socket.is_wanted(op):
            self._socket.send(op, encode_notice(op, seq, self.boot, message))
        return seq

    def hang_up(self) -> None:
        """End all connections: who is still let in connects again, and sees a gap."""
        if self._socket is not None and not self.closed:
            self._socket.close()
            self._socket = None
            self._bind_again(0)

    def _bind(self, endpoint: str) -> "_EventSocket":
        return _EventSocket(self._context, endpoint, self._options, self.hang_up)

    def _bind_again(self, _: int) -> None:
        """ZeroMQ gives the address back when it comes to it: until then, try."""
        if self.closed:
            return
        try:
            self._socket = self._bind(self.endpoint)
        except ConfigError:
            self.timers.at(self.timers.now() + _BIND_AGAIN_S, self._bind_again)
            return
        self._socket.start(asyncio.get_running_loop())

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._socket is not None:
            self._socket.start(loop)
        self._beat(0)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _beat(self, _: int) -> None:
        self._num_heartbeats += 1
        beat = Heartbeat(seqs=self._seqs, reads=self.count_reads())
        frame = encode_notice(beat.op, self._num_heartbeats, self.boot, beat)
        if self._socket is not None:
            self._socket.send(beat.op, frame)
            self._socket.read()
        self.timers.at(self.timers.now() + self._heartbeat_s, self._beat)


def _none() -> int:
    return 0


class _EventSocket:
    """An XPUB bound to ``endpoint``; raises `ConfigError` when that cannot be.

    ``on_crowded`` is called when there are more than `MAX_TOPICS`, of all subscribers together: it
    closes the socket, as ZeroMQ keeps each topic for as long as its connection lasts.
    """

    def __init__(
        self,
        context: BusContext,
        endpoint: str,
        options: SocketOptions,
        on_crowded: Callable[[], None],
    ) -> None:
        self._socket, self._on_crowded = open_publisher(context, endpoint, options), on_crowded
        self.endpoint = bound_endpoint(self._socket)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._topics: set[bytes] = set()
        self._is_wanted: dict[str, bool] = {}
        self._reads = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to read what subscribers say."""
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self.read)

    def close(self) -> None:
        """Close the socket; what it has queued is flushed for ``linger_s``."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close()

    def is_wanted(self, topic: str) -> bool:
        """Whether there may be a subscriber, as far as was read."""
        known = self._is_wanted.get(topic)
        if known is None:
            wanted = topic.encode()
            known = any(wanted[:end] in self._topics for end in range(len(wanted) + 1))
            self._is_wanted[topic] = known
        return known

    def send(self, topic: str, frame: bytes) -> None:
        """Send to whoever has subscribed; dropped for those that are behind, and once closed."""
        if self._socket.closed:
            return
        self._socket.send_multipart((topic.encode(), frame), zmq.NOBLOCK)
        if self._loop is not None and not self._reads:
            self._reads = True
            self._loop.call_soon(self.read)

    def read(self) -> None:
        """Read what was asked for; sending swallows its signal, so that this is called as well."""
        self._reads = False
        if self._socket.closed:
            return
        for _ in range(_BATCH):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._note(frame)
            if len(self._topics) > MAX_TOPICS:
                self._on_crowded()
                return
        if self._loop is not None:
            self._reads = True
            self._loop.call_soon(self.read)

    def _note(self, frame: zmq.Frame) -> None:
        asked = frame.bytes
        if asked[:1] == b"\1":
            self._topics.add(asked[1:])
        elif asked[:1] == b"\0" and descriptor_of(frame) is None:
            self._topics.discard(asked[1:])  # ZeroMQ itself says that the last subscriber has gone
        # An unsubscription that a connection sends may be of a topic that only others have
        # subscribed to: ZeroMQ hands that on as well. It changes nothing here.
        self._is_wanted.clear()
