"""Asks the agents without the lease whether their ranks are still those that a route reads.

Refuses to take one yes for all: `check` ends when every agent has said so, or with the first no.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvbus.errors import KVBusError
from kvbus.protocol.envelope import Body
from kvbus.protocol.message import to_body
from kvbus.protocol.sibling import CheckMemory
from kvbus_decode.routes import Route, Source

OnChecked = Callable[[KVBusError | None], None]


@dataclass(slots=True)
class _Check:
    """One question to several agents."""

    on_end: OnChecked
    num_left: int
    ended: bool = False

    def settle(self, outcome: Body | KVBusError) -> None:
        """One of them has answered, or does not."""
        self.num_left -= 1
        error = outcome if isinstance(outcome, KVBusError) else None
        if not self.ended and (error is not None or not self.num_left):
            self.ended = True
            self.on_end(error)


def check(route: Route, offer_id: str, *, timeout_s: float, on_end: OnChecked) -> None:
    """Ask after a read, before its bytes count; ``on_end`` is called once, with None for yes."""
    _ask(route, offer_id, attend_s=0.0, timeout_s=timeout_s, on_end=on_end)


def attend(
    route: Route, offer_id: str, *, attend_s: float, timeout_s: float, on_end: OnChecked
) -> None:
    """Have the agents serve what is read within ``attend_s``; one may say that it is in vain."""
    _ask(route, offer_id, attend_s=attend_s, timeout_s=timeout_s, on_end=on_end)


def _ask(
    route: Route, offer_id: str, *, attend_s: float, timeout_s: float, on_end: OnChecked
) -> None:
    others = route.sources[1:]
    if not others:
        on_end(None)
        return
    asked = _Check(on_end, len(others))
    for source in others:
        body = to_body(_message(route, source, offer_id, attend_s))
        try:
            source.peer.client.send(
                CheckMemory.op, body, timeout_s=timeout_s, on_reply=asked.settle
            )
        except KVBusError as error:
            asked.settle(error)


def _message(route: Route, source: Source, offer_id: str, attend_s: float) -> CheckMemory:
    return CheckMemory(
        agent_boot=source.agent_boot,
        engine_id=route.prefill.engine_id,
        memory_id=source.memory_id,
        offer_id=offer_id,
        attend_s=attend_s,
    )
