"""The sending end of events: a PUB that numbers each topic and beats.

Refuses to wait or to keep: ZeroMQ drops silently for a subscriber that is ``hwm`` messages behind.
The subscriber sees it by the seqs, those in heartbeats included.
"""

import asyncio

from kvbus.bus.pump import Pump
from kvbus.bus.socket_actor import SocketActor
from kvbus.bus.sockets import BusContext, SocketOptions, bound_endpoint, open_publisher
from kvbus.errors import LocalError
from kvbus.protocol.envelope import encode_notice
from kvbus.protocol.message import Message
from kvbus.protocol.peer import Heartbeat


class EventPublisher(SocketActor):
    """Events of one process to anyone: frames ``[op, event]``, with a seq from 1 for each op."""

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
        self._started_at = 0.0
        socket = open_publisher(context, endpoint, options or SocketOptions())
        self.endpoint = bound_endpoint(socket)
        self._pump = Pump(socket, on_frames=lambda _: None, on_failure=self._fail)

    def publish(self, op: str, message: Message) -> int:
        """Send an event; returns its seq among the events of this ``op``. Dropped once closed."""
        if op == Heartbeat.op:
            raise LocalError("the heartbeat topic is the publisher's own")
        seq = self._seqs.get(op, 0) + 1
        frame = encode_notice(op, seq, self.boot, message)
        self._seqs[op] = seq
        self._pump.send(op.encode(), frame)
        return seq

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pump.start(loop)
        self._started_at = loop.time()
        self._beat(0)

    def _close(self) -> None:
        self._pump.close()

    def _beat(self, _: int) -> None:
        now = self.timers.now()
        self._num_heartbeats += 1
        beat = Heartbeat(seqs=self._seqs, uptime_s=now - self._started_at)
        frame = encode_notice(beat.op, self._num_heartbeats, self.boot, beat)
        self._pump.send(beat.op.encode(), frame)
        self.timers.at(now + self._heartbeat_s, self._beat)
