"""The connection of a socket that connects: made, watched, and made again after a refusal.

ZeroMQ takes a refusal as final, and is silent about it. Here it is an error, and is tried again:
the key may be trusted by then.
"""

import asyncio
from collections.abc import Callable

from kvbus.bus.connection_watch import ConnectionEvent, ConnectionWatch
from kvbus.bus.listener_probe import ListenerProbe, is_local
from kvbus.bus.names import NamedConnection
from kvbus.bus.sockets import BusContext, Socket, SocketOptions, reconnect
from kvbus.bus.timers import Timers
from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError

RETRY_S, MAX_RETRY_S = 0.5, 10.0
BROKEN_OFF_S = 1.0

_FINAL = (ConnectionEvent.REFUSED, ConnectionEvent.MISMATCHED)


class Connection:
    """Connects to ``endpoint``; ``on_error`` is told of each refusal, and of names without address.

    `refusal` is the last refusal, until it is tried again. ``on_gone`` is told when the connection
    broke and nobody listens at its other end any more, as after the death of the process;
    `is_gone` is True then, until there is a connection again.

    Only TCP is watched. Raises `ConfigError` for an endpoint that is none, and `LocalError` for one
    that ``options`` do not allow.
    """

    def __init__(
        self,
        context: BusContext,
        socket: Socket,
        endpoint: str,
        *,
        options: SocketOptions,
        timers: Timers,
        on_error: Callable[[KVBusError], None],
        on_failure: Callable[[Exception], None],
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        self.refusal: RemoteError | None = None
        self.is_gone, self._is_made, self._on_gone = False, False, on_gone
        self._context = context
        self._probe = ListenerProbe(context, timers, self._find_gone)
        self._socket, self._timers, self._on_error = socket, timers, on_error
        self._named = NamedConnection(
            socket, endpoint, timers=timers, on_error=on_error, allowed=options.allowed
        )
        self._retry_s, self._open = RETRY_S, True
        self._broken_since: float | None = None
        self._has_keys = options.curve is not None
        self._watch = (
            ConnectionWatch(socket, on_event=self._see, on_failure=on_failure)
            if endpoint.startswith("tcp://")
            else None
        )
        try:
            self._named.connect()
        except LocalError:
            self.close()
            raise

    @property
    def missing(self) -> str:
        """What keeps a request from its answer; empty while there is a connection."""
        if not self._named.address:
            return "the name server has not told its address"
        return "" if self._is_made else "there is no connection"

    @property
    def is_gone_here(self) -> bool:
        """Whether `is_gone` is true of an address of this machine."""
        return self.is_gone and is_local(self._context, self._named.address)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look the name up, if there is one, and to watch."""
        self._named.start(loop)
        if self._watch is not None:
            self._watch.start(loop)

    def close(self) -> None:
        """Connect no more; call it before the socket is closed."""
        self._named.close()
        self._probe.end()
        self._open = False
        if self._watch is not None:
            self._watch.close()

    def _see(self, event: ConnectionEvent) -> None:
        if not self._open:
            return
        if event is ConnectionEvent.MADE:
            self._is_made, self.is_gone = True, False
            self._probe.end()
            self._retry_s, self._broken_since, self.refusal = RETRY_S, None, None
        elif event is ConnectionEvent.LOST and self._is_made and self._on_gone is not None:
            self._is_made = False
            self._probe.begin(self._named.address)
        elif event is ConnectionEvent.BROKEN_OFF and self._has_keys:
            self._see_broken_off()
        elif event in _FINAL:
            self.refusal = self._error(event)
            self._timers.at(self._timers.now() + self._retry_s, self._try_again)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            self._on_error(self.refusal)

    def _see_broken_off(self) -> None:
        """Tell of it once it goes on: once may be a server that ended, or was full, just then."""
        now = self._timers.now()
        if self._broken_since is None:
            self._broken_since = now
        elif now - self._broken_since >= BROKEN_OFF_S:
            self._on_error(self._error(ConnectionEvent.BROKEN_OFF))

    def _find_gone(self) -> None:
        self.is_gone = True
        if self._on_gone is not None:
            self._on_gone()

    def _try_again(self, _: int) -> None:
        if self._open:
            self.refusal = None
            reconnect(self._socket, self._named.address)

    def _error(self, event: ConnectionEvent) -> RemoteError:
        endpoint = self._named.endpoint
        problem = {
            ConnectionEvent.REFUSED: "refused our key: it is not among its authorized keys, or not "
            "with the role that this socket asks for (kvbus keys trust)",
            ConnectionEvent.MISMATCHED: "uses no keys, but we were given its server key"
            if self._has_keys
            else "uses keys: ask it with a key of our own and its server key",
            ConnectionEvent.BROKEN_OFF: "hangs up on our handshake: it has another server key than "
            "the one that we know, or it has no room for us",
        }[event]
        code = ErrorCode.FORBIDDEN if event in _FINAL else ErrorCode.PEER_UNREACHABLE
        return RemoteError(f"the agent at {endpoint} {problem}", code=code, endpoint=endpoint)
