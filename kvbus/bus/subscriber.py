"""The receiving end of events: one SUB for each endpoint, so that each is told apart.

Refuses to recover: a gap, a new boot or silence is reported, and the user resyncs over requests.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvbus.bus.actor import SocketActor, Timers
from kvbus.bus.boot import BootChange, BootWatch
from kvbus.bus.connection import Connection
from kvbus.bus.curve import ClientCurve, KeyPair
from kvbus.bus.pump import Pump
from kvbus.bus.sockets import BusContext, SocketOptions, open_subscriber
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.protocol.envelope import Notice, decode
from kvbus.protocol.events import Heartbeat


class EventListener:
    """What a subscriber reports, always with the endpoint; override what is of interest."""

    def on_event(self, endpoint: str, event: Notice) -> None:
        """An event arrived that is no heartbeat."""

    def on_heartbeat(self, endpoint: str, boot: str, reads: int) -> None:
        """The publisher lives, and says so about once a second; so many read what it has."""

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        """Events of ``topic`` were lost, or came before we listened; before what shows it."""

    def on_boot(self, endpoint: str, boot: str) -> None:
        """The publisher's boot id became known, or changed."""

    def on_silence(self, endpoint: str, boot: str | None) -> None:
        """Nothing came for ``silence_s``; ``boot`` is None when nothing ever came."""

    def on_alive(self, endpoint: str, boot: str) -> None:
        """Something came again after silence."""


class EventSubscriber(SocketActor):
    """Events of many publishers, by endpoint; endpoints may come and go at any time.

    ``keys`` are what publishers with a server key know us by; one that refuses them is silent.
    Exceptions out of ``listener`` go to ``on_fault``; without one they end `run`.
    """

    def __init__(
        self,
        context: BusContext,
        listener: EventListener,
        *,
        topics: Iterable[str] = (),
        silence_s: float = 3.0,
        on_fault: Callable[[Exception], None] | None = None,
        max_endpoints: int = 1024,
        options: SocketOptions | None = None,
        keys: KeyPair | None = None,
    ) -> None:
        super().__init__()
        self.listener, self.silence_s = listener, silence_s
        self.topics = frozenset(topics)
        self.on_fault = on_fault or self._fail
        self._context, self._options, self._keys = context, options or SocketOptions(), keys
        self._max_endpoints = max_endpoints
        self._feeds: dict[str, _Feed] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def endpoints(self) -> list[str]:
        """The endpoints that are listened to."""
        return list(self._feeds)

    def add(self, endpoint: str, *, server_key: str = "") -> None:
        """Listen to ``endpoint``; nothing happens when that is done already.

        Raises `ConfigError` for an endpoint that cannot be parsed, `LocalError` with code ``busy``
        when there are too many.
        """
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
        """Listen no more to ``endpoint``; nothing happens when it was not listened to."""
        feed = self._feeds.pop(endpoint, None)
        if feed is not None:
            feed.close()

    def fail(self, error: Exception) -> None:
        """End `run` with ``error``."""
        self._fail(error)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for feed in self._feeds.values():
            feed.start(loop)

    def _close(self) -> None:
        for endpoint in self.endpoints:
            self.remove(endpoint)


def _ignore(_: KVBusError) -> None:
    """A name that cannot be resolved, or a refusal, is silence, which is reported."""


class _Feed:
    """One endpoint: its socket, the boot behind it, its seqs, and when it was last heard."""

    def __init__(
        self, owner: EventSubscriber, context: BusContext, endpoint: str, options: SocketOptions
    ) -> None:
        self._owner, self._endpoint = owner, endpoint
        self._timers: Timers = owner.timers
        self._peer, self._sequence = BootWatch(), TopicSequence(owner.topics)
        self._heard_at = 0.0
        self._silent = self._closed = False
        topics = owner.topics | {Heartbeat.op} if owner.topics else owner.topics
        socket = open_subscriber(context, endpoint, topics, options)
        self._connection = Connection(
            context,
            socket,
            endpoint,
            options=options,
            timers=self._timers,
            on_error=_ignore,
            on_failure=owner.fail,
        )
        self._pump = Pump(
            socket,
            on_frames=self._on_frames,
            on_failure=owner.fail,
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._heard_at = loop.time()
        self._pump.start(loop)
        self._connection.start(loop)
        self._timers.at(self._heard_at + self._owner.silence_s, self._on_timer)

    def close(self) -> None:
        self._closed = True
        self._connection.close()
        self._pump.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            event = self._read(frames)
            self._see_boot(event.boot)
            self._heard()
            missing = self._missing(event)
        except ProtocolError:  # or of an earlier boot: it changes nothing
            return
        self._report(event, missing)

    def _read(self, frames: list[bytes]) -> Notice:
        if len(frames) != 2:
            raise ProtocolError(f"event has {len(frames)} frames")
        event = decode(frames[1])
        if not isinstance(event, Notice):
            raise ProtocolError("not an event")
        if event.op.encode() != frames[0]:
            raise ProtocolError(f"event '{event.op}' behind another topic")
        return event

    def _see_boot(self, boot: str) -> None:
        if boot == self._peer.current:
            return
        if self._peer.see(boot) is BootChange.RETIRED:
            raise ProtocolError("event of an earlier boot", code=ErrorCode.STALE)
        self._sequence = TopicSequence(self._owner.topics)
        self._tell(self._owner.listener.on_boot, self._endpoint, boot)

    def _heard(self) -> None:
        self._heard_at = self._timers.now()
        if self._silent:
            self._silent = False
            self._tell(self._owner.listener.on_alive, self._endpoint, self._peer.current)

    def _missing(self, event: Notice) -> list[str]:
        """The topics of which something was lost, by what this event or heartbeat says."""
        if event.op != Heartbeat.op:
            return [event.op] if self._sequence.see(event.op, event.seq) else []
        seqs = event.body.get("seqs")
        if not isinstance(seqs, dict):
            raise ProtocolError("heartbeat without seqs")
        return self._sequence.see_heartbeat(seqs)

    def _report(self, event: Notice, missing: list[str]) -> None:
        owner = self._owner
        for topic in missing:
            self._tell(owner.listener.on_gap, self._endpoint, event.boot, topic)
        if event.op == Heartbeat.op:
            reads = event.body.get("reads", 0)
            known = reads if isinstance(reads, int) and reads >= 0 else 0
            self._tell(owner.listener.on_heartbeat, self._endpoint, event.boot, known)
        else:
            self._tell(owner.listener.on_event, self._endpoint, event)

    def _on_timer(self, _: int) -> None:
        if self._closed:
            return
        now = self._timers.now()
        silent_at = self._heard_at + self._owner.silence_s
        if now >= silent_at:
            silent_at = now + self._owner.silence_s
            if not self._silent:
                self._silent = True
                self._tell(self._owner.listener.on_silence, self._endpoint, self._peer.current)
        self._timers.at(silent_at, self._on_timer)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._closed:
            return
        try:
            callback(*arguments)
        except Exception as error:  # the user's callback must not end the subscription
            self._owner.on_fault(error)


MAX_TOPICS = 256


class TopicSequence:
    """What was seen of one boot of a publisher, as a subscriber with some or all topics."""

    def __init__(self, topics: frozenset[str]) -> None:
        self._topics = topics
        self._last: dict[str, int] = {}

    def see(self, topic: str, seq: int) -> int:
        """Take note of an event; returns how many before it are missing.

        Raises `ProtocolError` for a seq that is not larger than the last, or a topic too many.
        """
        self._require_room((topic,))
        last = self._last.get(topic, 0)
        if seq <= last:
            raise ProtocolError(f"seq {seq} of topic '{topic}' after {last}")
        self._last[topic] = seq
        return seq - last - 1

    def see_heartbeat(self, seqs: Mapping[object, object]) -> list[str]:
        """Take note of the last seqs of all topics; returns the topics whose tail is missing."""
        checked = self._checked(seqs)
        self._require_room(topic for topic, _ in checked)
        missing = []
        for topic, seq in checked:
            last = self._last.get(topic, 0)
            if seq > last:
                missing.append(topic)
            self._last[topic] = max(seq, last)
        return missing

    def _checked(self, seqs: Mapping[object, object]) -> list[tuple[str, int]]:
        """The seqs of our topics, all of them plausible: half a heartbeat must change nothing."""
        checked = []
        for topic, seq in seqs.items():
            if not isinstance(topic, str) or type(seq) is not int or seq < 0:
                raise ProtocolError("heartbeat's seqs must map topics to unsigned integers")
            if not self._topics or topic in self._topics:
                checked.append((topic, seq))
        return checked

    def _require_room(self, topics: Iterable[str]) -> None:
        num_new = sum(topic not in self._last for topic in topics)
        if num_new and len(self._last) + num_new > MAX_TOPICS:
            raise ProtocolError(f"publisher has more than {MAX_TOPICS} topics")
