"""The sending end of events: a PUB that numbers each topic and beats.

Refuses to wait or to keep: ZeroMQ drops silently for a subscriber that is ``hwm`` messages behind.
The subscriber sees it by the seqs, those in heartbeats included.
"""

import asyncio
from collections.abc import Callable

from kvbus.bus.event_socket import EventSocket
from kvbus.bus.socket_actor import SocketActor
from kvbus.bus.sockets import BusContext, SocketOptions
from kvbus.bus.traffic import Watch
from kvbus.errors import ConfigError, LocalError
from kvbus.protocol.envelope import encode_notice
from kvbus.protocol.events import Heartbeat
from kvbus.protocol.message import Message

_BIND_AGAIN_S = 0.02


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
        watch: Watch | None = None,
    ) -> None:
        super().__init__()
        self.boot = boot
        self._heartbeat_s = heartbeat_s
        self._seqs: dict[str, int] = {}
        self._num_heartbeats = 0
        self._started_at = 0.0
        self.count_reads: Callable[[], int] = _none
        """How many reads of what the process has are under way, for heartbeats."""
        self._context, self._options = context, options or SocketOptions()
        self._watch = watch
        self._socket: EventSocket | None = self._bind(endpoint)
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

    def _bind(self, endpoint: str) -> EventSocket:
        return EventSocket(self._context, endpoint, self._options, self._watch)

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
        self._started_at = loop.time()
        self._beat(0)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _beat(self, _: int) -> None:
        now = self.timers.now()
        self._num_heartbeats += 1
        uptime_s = now - self._started_at
        beat = Heartbeat(seqs=self._seqs, uptime_s=uptime_s, reads=self.count_reads())
        frame = encode_notice(beat.op, self._num_heartbeats, self.boot, beat)
        if self._socket is not None:
            self._socket.send(beat.op, frame)
            self._socket.read()
        self.timers.at(now + self._heartbeat_s, self._beat)


def _none() -> int:
    return 0
