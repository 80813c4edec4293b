"""Asks agents that do not see our lease to serve reads, and whether their ranks are still the same.

One question to several agents ends when every agent has said yes, or with the first no.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbus.errors import KVBusError
from kvbus.protocol.message import Empty
from kvbus.protocol.peer import CheckMemory
from kvbus_decode.peer.route import Route, Source

OnChecked = Callable[[KVBusError | None], None]


@dataclass(slots=True)
class _Question:
    """One question to several agents."""

    on_end: OnChecked
    num_left: int
    ended: bool = False

    def settle(self, answer: Empty | KVBusError) -> None:
        """One of them has answered, or does not."""
        self.num_left -= 1
        error = answer if isinstance(answer, KVBusError) else None
        if not self.ended and (error is not None or not self.num_left):
            self.ended = True
            self.on_end(error)


def check_memory(
    route: Route,
    sources: Sequence[Source],
    offer_id: str,
    *,
    timeout_s: float,
    on_end: OnChecked,
    progress_s: float = 0.0,
) -> None:
    """Ask whether the ranks of ``sources`` are still those of the route, before bytes count.

    With ``progress_s`` they also serve what is read within it; without they serve no more.
    ``on_end`` is called once, with None for yes from all.
    """
    question = _Question(on_end, len(sources))
    for source in sources:
        message = CheckMemory(
            agent_boot=source.agent_boot,
            engine_id=route.prefill.engine_id,
            memory_id=source.memory_id,
            access=source.access,
            offer_id=offer_id,
            progress_s=progress_s,
        )
        source.peer.ask(message, timeout_s, question.settle)
