"""Events: a publisher with a seq for each topic, and a subscriber that detects gaps.

ZeroMQ silently drops messages for a subscriber that is ``hwm`` behind.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvbus.bus.actor import SocketActor
from kvbus.bus.connection import WatchedConnection
from kvbus.bus.pump import Pump
from kvbus.bus.sockets import (
    BusContext,
    SocketOptions,
    bound_endpoint,
    descriptor_of,
    open_publisher,
    open_subscriber,
)
from kvbus.bus.trust import ClientCurve, KeyPair
from kvbus.errors import ConfigError, ErrorCode, LocalError, ProtocolError
from kvbus.protocol.envelope import MAX_PEER_ITEMS, Notice, decode, encode_notice
from kvbus.protocol.message import Message, from_body
from kvbus.protocol.tools import Heartbeat

_BIND_AGAIN_S = 0.02
MAX_TOPICS = 256


class EventPublisher(SocketActor):
    """Publisher of frames ``[op, event]``, seq from 1 for each op."""

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
        self.boot, self.endpoint = boot, endpoint
        self._context, self._options = context, options or SocketOptions()
        self._heartbeat_s, self._num_heartbeats = heartbeat_s, 0
        self._seqs: dict[str, int] = {}
        self._topics: set[bytes] = set()
        self._is_wanted: dict[str, bool] = {}
        self._pump: Pump | None = self._bind()

    def publish(self, op: str, message: Message) -> None:
        if op == Heartbeat.op:
            raise LocalError("the heartbeat topic is the publisher's own")
        seq = self._seqs[op] = self._seqs.get(op, 0) + 1
        is_wanted = self._is_wanted.get(op)
        if is_wanted is None:
            topic = op.encode()
            is_wanted = any(topic[:end] in self._topics for end in range(len(topic) + 1))
            self._is_wanted[op] = is_wanted
        if is_wanted and self._pump is not None:
            self._pump.send(op.encode(), encode_notice(op, seq, self.boot, message))

    def close_connections(self) -> None:
        """Close all connections. Admitted subscribers reconnect and see a gap."""
        if self._pump is not None and not self.closed:
            self._pump.close()
            self._pump = None
            self._topics.clear()
            self._is_wanted.clear()
            self._bind_again()

    def _bind(self) -> Pump:
        socket = open_publisher(self._context, self.endpoint, self._options)
        self.endpoint = bound_endpoint(socket)
        return Pump(socket, on_frames=self._on_frames, on_failure=self._fail)

    def _bind_again(self) -> None:
        """Retry until ZeroMQ has released the address."""
        try:
            self._pump = self._bind()
        except ConfigError:
            now = asyncio.get_running_loop().time()
            self._call_at(now + _BIND_AGAIN_S, self._bind_again)
        else:
            self._pump.start(asyncio.get_running_loop())

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._pump is not None:
            self._pump.start(loop)
        self._beat()

    def _close(self) -> None:
        if self._pump is not None:
            self._pump.close()

    def _beat(self) -> None:
        self._num_heartbeats += 1
        beat = Heartbeat(seqs=self._seqs)
        if self._pump is not None:
            frame = encode_notice(beat.op, self._num_heartbeats, self.boot, beat)
            self._pump.send(beat.op.encode(), frame)
        self._call_at(asyncio.get_running_loop().time() + self._heartbeat_s, self._beat)

    def _on_frames(self, frames: list[bytes]) -> None:
        kind, topic = frames[0][:1], frames[0][1:]
        if kind == b"\1":
            self._topics.add(topic)
        elif kind == b"\0" and self._last_subscriber_left():
            self._topics.discard(topic)
        self._is_wanted.clear()
        if len(self._topics) > MAX_TOPICS:
            self.close_connections()

    def _last_subscriber_left(self) -> bool:
        """Return whether ZeroMQ made the frame: clients may unsubscribe from topics of others."""
        frame = self._pump.last if self._pump is not None else None
        return frame is not None and descriptor_of(frame) is None


class EventListener:
    def on_event(self, endpoint: str, event: Notice) -> None:
        """Called for each event except heartbeats."""

    def on_heartbeat(self, endpoint: str, boot: str) -> None:
        """Called about once a second."""

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        """Called on missing events, perhaps from before the subscription."""

    def on_boot(self, endpoint: str, boot: str) -> None:
        """Called on a new boot id."""


class EventSubscriber(SocketActor):
    """Subscriber to many publishers; one that rejects ``keys`` is silent.

    Exceptions of ``listener`` go to ``on_fault``; without one they end `run`.
    """

    def __init__(
        self,
        context: BusContext,
        listener: EventListener,
        *,
        topics: Iterable[str] = (),
        on_fault: Callable[[Exception], None] | None = None,
        max_endpoints: int = 1024,
        options: SocketOptions | None = None,
        keys: KeyPair | None = None,
    ) -> None:
        super().__init__()
        self.listener, self.topics = listener, frozenset(topics)
        self.on_fault = on_fault or self._fail
        self._context, self._options, self._keys = context, options or SocketOptions(), keys
        self._max_endpoints = max_endpoints
        self._feeds: dict[str, _Feed] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def endpoints(self) -> list[str]:
        return list(self._feeds)

    def add(self, endpoint: str, *, server_key: str = "") -> None:
        """Subscribe once. Raises `ConfigError` or `LocalError` (``busy``)."""
        if endpoint in self._feeds:
            return
        if len(self._feeds) >= self._max_endpoints:
            raise LocalError("too many endpoints", code=ErrorCode.BUSY, endpoint=endpoint)
        options = self._options
        if self._keys is not None:
            options = replace(options, curve=ClientCurve(self._keys, server_key))
        feed = self._feeds[endpoint] = _Feed(self, self._context, endpoint, options)
        if self._loop is not None:
            feed.start(self._loop)

    def remove(self, endpoint: str) -> None:
        feed = self._feeds.pop(endpoint, None)
        if feed is not None:
            feed.close()

    def fail(self, error: Exception) -> None:
        self._fail(error)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for feed in self._feeds.values():
            feed.start(loop)

    def _close(self) -> None:
        for endpoint in self.endpoints:
            self.remove(endpoint)


class _Feed(WatchedConnection):
    def __init__(
        self, owner: EventSubscriber, context: BusContext, endpoint: str, options: SocketOptions
    ) -> None:
        topics = owner.topics | {Heartbeat.op} if owner.topics else owner.topics
        socket = open_subscriber(context, endpoint, topics, options)
        super().__init__(context, socket, endpoint, options)
        self._owner = owner
        self._seqs: dict[str, int] = {}

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._start(loop)

    def _fail(self, error: Exception) -> None:
        self._owner.fail(error)

    def _on_frames(self, frames: list[bytes]) -> None:
        listener, at = self._owner.listener, self.endpoint
        try:
            event = _read(frames)
            if not self._note_boot(event.boot):
                return
            beat = from_body(Heartbeat, event.body) if event.op == Heartbeat.op else None
            missing = self._missing(event) if beat is None else self._missing_tails(beat)
        except ProtocolError:  # ignored
            return
        for topic in missing:
            self._notify(listener.on_gap, at, event.boot, topic)
        if beat is not None:
            self._notify(listener.on_heartbeat, at, event.boot)
        else:
            self._notify(listener.on_event, at, event)

    def _on_boot(self, boot: str, before: str | None) -> None:
        self._seqs.clear()
        self._notify(self._owner.listener.on_boot, self.endpoint, boot)

    def _missing(self, event: Notice) -> list[str]:
        """Return the topic if earlier events are missing. Raises `ProtocolError` if old."""
        last = self._seqs.get(event.op, 0)
        if event.seq <= last:
            raise ProtocolError(f"seq {event.seq} of topic '{event.op}' after {last}")
        self._take({event.op: event.seq})
        return [event.op] if event.seq > last + 1 else []

    def _missing_tails(self, beat: Heartbeat) -> list[str]:
        known, topics = self._seqs, self._owner.topics
        seqs = {topic: seq for topic, seq in beat.seqs.items() if not topics or topic in topics}
        missing = [topic for topic, seq in seqs.items() if seq > known.get(topic, 0)]
        self._take({topic: max(seq, known.get(topic, 0)) for topic, seq in seqs.items()})
        return missing

    def _take(self, seqs: dict[str, int]) -> None:
        seqs = self._seqs | seqs
        if len(seqs) > MAX_TOPICS:
            raise ProtocolError(f"publisher has more than {MAX_TOPICS} topics")
        self._seqs = seqs

    def _notify(self, callback: Callable[..., None], *arguments: object) -> None:
        if self.closed:
            return
        try:
            callback(*arguments)
        except Exception as error:  # a user's callback must not end the subscription
            self._owner.on_fault(error)


def _read(frames: list[bytes]) -> Notice:
    if len(frames) != 2:
        raise ProtocolError(f"event has {len(frames)} frames")
    event = decode(frames[1], max_items=MAX_PEER_ITEMS)
    if not isinstance(event, Notice):
        raise ProtocolError("not an event")
    if event.op.encode() != frames[0]:
        raise ProtocolError(f"event '{event.op}' behind another topic")
    return event
