"""Asks whether anybody listens where a connection broke: a refusal says that the process is gone.

Refuses to guess: who does not answer may be cut off, and who listens will be connected to again.
"""

import errno
import ipaddress
import socket
from collections.abc import Callable

from kvbus.bus.sockets import BusContext
from kvbus.bus.timers import Timers

PERIOD_S, MAX_PERIOD_S = 0.2, 2.0
REFUSALS = 2
"""One may be a process that binds its port just then."""


class ListenerProbe:
    """Calls ``on_gone`` once after `begin`, unless `end` came first or somebody listens."""

    def __init__(self, context: BusContext, timers: Timers, on_gone: Callable[[], None]) -> None:
        self._context, self._timers, self._on_gone = context, timers, on_gone
        self._address = ""
        self._turn = self._num_refused = 0
        self._period_s = PERIOD_S
        self._probe: socket.socket | None = None

    def begin(self, address: str) -> None:
        """The connection to ``address``, tcp:// and numbers, broke."""
        self.end()
        self._address, self._num_refused, self._period_s = address, 0, PERIOD_S
        self._later()

    def end(self) -> None:
        """There is a connection again, or it is not wanted any more."""
        self._turn += 1
        self._drop()

    def _later(self) -> None:
        self._timers.at(self._timers.now() + self._period_s, self._look, self._turn)

    def _look(self, turn: int) -> None:
        """What became of the last probe; then the next one."""
        if turn != self._turn:
            return
        result = self._result()
        self._drop()
        if result == 0:
            return
        self._num_refused += result == errno.ECONNREFUSED
        if self._num_refused >= REFUSALS:
            self._on_gone()
            return
        if result not in (None, errno.ECONNREFUSED):
            self._period_s = min(2 * self._period_s, MAX_PERIOD_S)
        self._try()
        self._later()

    def _result(self) -> int | None:
        """0 when it is connected, why it is not otherwise; None before the first."""
        if self._probe is None:
            return None
        failure = self._probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            return failure
        try:
            self._probe.getpeername()
        except OSError as error:
            return error.errno or errno.ENOTCONN
        return 0

    def _try(self) -> None:
        family, host, port = _place(self._address)
        self._probe = self._context.probe_socket(family, socket.SOCK_STREAM)
        self._probe.setblocking(False)
        if self._probe.connect_ex((host, port)) == errno.ECONNREFUSED:
            self._num_refused += 1
            self._drop()

    def _drop(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def is_local(context: BusContext, address: str) -> bool:
    """Whether ``address``, tcp:// and numbers, is one of this machine, or of this container."""
    family, host, _ = _place(address)
    with context.probe_socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _place(address: str) -> tuple[socket.AddressFamily, str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    is_six = ipaddress.ip_address(host.partition("%")[0]).version == 6
    return socket.AF_INET6 if is_six else socket.AF_INET, host, int(port)
