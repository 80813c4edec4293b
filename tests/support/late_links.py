"""A link between agents that holds back requests of one kind, and counts requests by kind.

Prepare the agent with `LINKED`, so that other agents connect through the link.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.agents import AgentProcess
from tests.tools.chaos.links import PROXY_HOST, Link

LINKED: dict[str, Any] = {"advertise_host": PROXY_HOST}
COUNTED = ("check", "cancel_part")


class LateLink(Link):
    """Holds back the next request of the kind ``late``, and everything after it, until `heal`."""

    late = ""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.counts = Counter[str]()

    @property
    def is_holding(self) -> bool:
        return not self._passes.is_set()

    async def _let(self, some: bytes, *, is_request: bool) -> None:
        if is_request:
            if self.late and _packed(self.late) in some:
                self.blacken()
            self.counts.update({op: some.count(_packed(op)) for op in COUNTED})
        await self._passes.wait()

    def heal(self) -> None:
        self.late = ""
        super().heal()


def _packed(op: str) -> bytes:
    """The operation as msgpack has it in a request."""
    return b"\xa2op" + bytes([0xA0 | len(op)]) + op.encode()


@asynccontextmanager
async def late_link(agent: AgentProcess) -> AsyncIterator[LateLink]:
    """A link to a prepared agent; once it runs, call `look_past_link`."""
    link = LateLink(int(agent.settings["peer_bind"].rpartition(":")[2]))
    await link.open()
    try:
        yield link
    finally:
        await link.close()


def look_past_link(agent: AgentProcess) -> None:
    """Have the test's own requests reach the agent without its link."""
    agent.started["peer"] = agent.settings["peer_bind"]
