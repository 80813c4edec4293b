"""Decides whose CURVE key is let in, for all sockets of one ZeroMQ context: the ZAP handler.

Refuses whatever is not CURVE. While it does not run nobody is let in: handshakes wait.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from zmq.utils import z85

from kvbus.bus.actor import SocketActor
from kvbus.bus.pump import Pump
from kvbus.bus.sockets import BusContext, open_zap

_VERSION, _CURVE = b"1.0", b"CURVE"
_LET_IN, _REFUSED = b"200", b"400"
_NUM_FRAMES = 9


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

    def __init__(self, context: BusContext, admit: Callable[[Applicant], Awaitable[bool]]) -> None:
        super().__init__()
        self._admit = admit
        self._answering = set[asyncio.Task[None]]()
        self._pump = Pump(open_zap(context), on_frames=self._on_frames, on_failure=self._fail)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pump.start(loop)

    def _close(self) -> None:
        for task in self._answering:
            task.cancel()
        self._pump.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(frames))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, frames: list[bytes]) -> None:
        """Answer libzmq, RFC 27: version, request, domain, address, identity, mechanism, key."""
        sender, delimiter, _, request, *_ = frames
        try:
            key = await self._key_if_admitted(frames)
            code = _LET_IN if key else _REFUSED
            self._pump.send(sender, delimiter, _VERSION, request, code, b"", key.encode(), b"")
        except Exception as error:  # a bug of ours: nobody could connect any more
            self._fail(error)

    async def _key_if_admitted(self, frames: list[bytes]) -> str:
        if len(frames) != _NUM_FRAMES or frames[7] != _CURVE:
            return ""
        key = z85.encode(frames[8]).decode()
        applicant = Applicant(key, address=frames[5].decode(), domain=frames[4].decode())
        return key if await self._admit(applicant) else ""
