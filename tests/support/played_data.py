"""A fake data process: it only answers `ListListening`, with sockets or errors."""

import asyncio
from collections.abc import Iterable, Sequence

from kvbus.data.client import DataProcess, OnExit, OnMessage
from kvbus.data.messages import DataReply, Failure, Listening, ListListening, ToData
from kvbus.errors import KVBusError


class Played:
    """Answers `ListListening` with these errors, then with these sockets."""

    pid = 1

    def __init__(
        self,
        sockets: tuple[tuple[str, int], ...],
        errors: Iterable[KVBusError],
        on_message: OnMessage,
    ) -> None:
        self._sockets, self._errors, self._on_message = sockets, list(errors), on_message

    def send(self, message: ToData, _fds: Sequence[int] = ()) -> None:
        reply = DataReply(message.id)
        if isinstance(message, ListListening):
            error = Failure.of(self._errors.pop(0)) if self._errors else None
            reply = DataReply(message.id, error=error, result=Listening(self._sockets))
        asyncio.get_running_loop().call_soon(self._on_message, reply)

    def kill(self) -> None:
        """Do nothing: it never ends."""


def played(*sockets: tuple[str, int], errors: Iterable[KVBusError] = ()) -> DataProcess:
    def spawn(_boot: str, on_message: OnMessage, _on_exit: OnExit) -> Played:
        return Played(sockets, errors, on_message)

    data = DataProcess(
        spawn, new_boot=lambda: "boot", name="d", slice_bytes=1 << 20, copy_threads=1
    )
    data.start_one()
    return data
