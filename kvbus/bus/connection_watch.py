"""What becomes of the connection of a socket that connects, by its monitor.

A socket has one monitor: whoever wants to know more of a connection is told by this one.
"""

import asyncio
import contextlib
from collections.abc import Callable
from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbus.bus.pump import Pump
from kvbus.bus.sockets import Socket


class ConnectionEvent(Enum):
    """What happened to the connection."""

    MADE = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    """Both sides know each other."""
    LOST = int(zmq.EVENT_DISCONNECTED)
    """It ended, or its handshake did; ZeroMQ connects again unless it was refused."""
    REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    """The other side does not take our key; ZeroMQ does not connect again."""
    MISMATCHED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    """One side has keys and the other has none; ZeroMQ does not connect again."""
    BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    """The other side hung up within the handshake, as one does that has another server key."""


_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_ALL = sum(event.value for event in ConnectionEvent)


class ConnectionWatch:
    """Calls ``on_event`` for each event, in the event loop; exceptions go to ``on_failure``.

    Make it before the socket is connected: what happens earlier is not told.
    """

    def __init__(
        self,
        socket: Socket,
        *,
        on_event: Callable[[ConnectionEvent], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._socket, self._on_event = socket, on_event
        monitor: Socket = socket.get_monitor_socket(_ALL)
        self._pump = Pump(monitor, on_frames=self._on_frames, on_failure=on_failure)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to tell."""
        self._pump.start(loop)

    def close(self) -> None:
        """Tell no more; call it before the socket is closed."""
        with contextlib.suppress(zmq.ZMQError):  # an endpoint that is none has closed the socket
            self._socket.disable_monitor()
        self._pump.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        event = ConnectionEvent(message["event"])
        if event is not ConnectionEvent.MISMATCHED or message["value"] == _OTHER_MECHANISM:
            self._on_event(event)
