"""Asks agents that do not see our lease to serve reads, and whether their ranks are still the same.

Refuses to take one yes for all: `check` ends when every agent has said so, or with the first no.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbus.errors import KVBusError
from kvbus.protocol.message import Empty
from kvbus.protocol.remote_ranks import CheckMemory
from kvbus_decode.peer.route import Route, Source

OnChecked = Callable[[KVBusError | None], None]


@dataclass(slots=True)
class _Asked:
    """One question to several agents."""

    on_end: OnChecked
    num_left: int
    ended: bool = False

    def settle(self, outcome: Empty | KVBusError) -> None:
        """One of them has answered, or does not."""
        self.num_left -= 1
        error = outcome if isinstance(outcome, KVBusError) else None
        if not self.ended and (error is not None or not self.num_left):
            self.ended = True
            self.on_end(error)


def check(
    route: Route, sources: Sequence[Source], offer_id: str, *, timeout_s: float, on_end: OnChecked
) -> None:
    """Ask after a read, before its bytes count; ``on_end`` is called once, with None for yes."""
    question = _Question(route, offer_id, progress_s=0.0)
    question.ask(sources, timeout_s, on_end)


def attend(
    route: Route,
    sources: Sequence[Source],
    offer_id: str,
    *,
    progress_s: float,
    timeout_s: float,
    on_end: OnChecked,
) -> None:
    """Have agents serve what is read within ``progress_s``; one may say that it is in vain."""
    question = _Question(route, offer_id, progress_s=progress_s)
    question.ask(sources, timeout_s, on_end)


@dataclass(frozen=True, slots=True)
class _Question:
    route: Route
    offer_id: str
    progress_s: float

    def ask(self, sources: Sequence[Source], timeout_s: float, on_end: OnChecked) -> None:
        """Ask each source."""
        if not sources:
            on_end(None)
            return
        asked = _Asked(on_end, len(sources))
        for source in sources:
            message = self._message(source)
            try:
                source.peer.client.send(message, timeout_s=timeout_s, on_reply=asked.settle)
            except KVBusError as error:
                asked.settle(error)

    def _message(self, source: Source) -> CheckMemory:
        return CheckMemory(
            agent_boot=source.agent_boot,
            engine_id=self.route.prefill.engine_id,
            memory_id=source.memory_id,
            offer_id=self.offer_id,
            progress_s=self.progress_s,
        )
