"""Decides whose CURVE key is let in, for all sockets of one ZeroMQ context: the ZAP handler.

Refuses whatever is not CURVE. While it does not run nobody is let in: handshakes wait.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from zmq.utils import z85

from kvbus.bus.pump import Pump
from kvbus.bus.socket_actor import SocketActor
from kvbus.bus.sockets import BusContext, open_zap

_VERSION, _CURVE = b"1.0", b"CURVE"
_LET_IN, _REFUSED = b"200", b"400"
_NUM_FRAMES = 7


@dataclass(frozen=True, slots=True)
class Applicant:
    """Who asks to be let in: the public key, the address, and the domain of the socket."""

    key: str
    address: str
    domain: str


class KeyCheck(SocketActor):
    """Asks ``admit`` about each handshake; make it before the sockets that need it are bound.

    The key of who is let in is the ``User-Id`` of all its messages. One who is refused is told so,
    by a code alone (400), and does not try again by itself.
    """

    def __init__(self, context: BusContext, admit: Callable[[Applicant], bool]) -> None:
        super().__init__()
        self._admit = admit
        self._pump = Pump(open_zap(context), on_frames=self._on_frames, on_failure=self._fail)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pump.start(loop)

    def _close(self) -> None:
        self._pump.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        """Answer libzmq, RFC 27: version, request, domain, address, identity, mechanism, key."""
        key = self._key_if_admitted(frames)
        code = _LET_IN if key else _REFUSED
        self._pump.send(_VERSION, frames[1], code, b"", key.encode(), b"")

    def _key_if_admitted(self, frames: list[bytes]) -> str:
        if len(frames) != _NUM_FRAMES or frames[5] != _CURVE:
            return ""
        key = z85.encode(frames[6]).decode()
        applicant = Applicant(key, address=frames[3].decode(), domain=frames[2].decode())
        return key if self._admit(applicant) else ""
