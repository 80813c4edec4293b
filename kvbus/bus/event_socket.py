"""The bound socket of a publisher: sends to whoever has subscribed, and notes what is asked for.

Refuses what is no subscription, or too long for a topic: the guard ends that connection.
"""

import asyncio

import zmq

from kvbus.bus.sockets import BusContext, SocketOptions, bound_endpoint, open_publisher
from kvbus.bus.traffic import Watch, descriptor_of

MAX_TOPIC_BYTES = 64
MAX_TOPICS = 256
"""With so many, all topics count as wanted from then on."""
_BATCH = 200


# An XPUB takes new subscriptions in within any call, as many as come: a stream of them holds the
# call. So no call may keep the interpreter, as asking for ZMQ_EVENTS does in pyzmq: sending and
# receiving do not, and the thread of the guard ends the stream.
class EventSocket:
    """An XPUB bound to ``endpoint``; raises `ConfigError` when that cannot be."""

    def __init__(
        self, context: BusContext, endpoint: str, options: SocketOptions, watch: Watch | None
    ) -> None:
        self._socket, self._traffic = open_publisher(context, endpoint, options, watch=watch)
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
            known = len(self._topics) >= MAX_TOPICS or any(
                wanted[:end] in self._topics for end in range(len(wanted) + 1)
            )
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
        if self._loop is not None:
            self._reads = True
            self._loop.call_soon(self.read)

    def _note(self, frame: zmq.Frame) -> None:
        asked, fd = frame.bytes, descriptor_of(frame)
        is_topic = len(asked) <= 1 + MAX_TOPIC_BYTES and asked[:1] in (b"\0", b"\1")
        if is_topic and len(self._topics) < MAX_TOPICS:
            self._is_wanted.clear()
            if asked[:1] == b"\1":
                self._topics.add(asked[1:])
            elif fd is None:  # ZeroMQ itself says that the last subscriber has gone
                self._topics.discard(asked[1:])
            # An unsubscription that a connection sends may be of a topic that only others have
            # subscribed to: ZeroMQ hands that on as well. It changes nothing here.
        if self._traffic is None or fd is None:
            return
        self._traffic.delivered(fd, len(asked))
        if not is_topic:
            self._traffic.unwanted.add(fd)
