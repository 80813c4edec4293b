"""A link that loses what is said once, on purpose: an answer, or a request and all after it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.agents import AgentProcess
from tests.chaos.links import Link


def said(op: str) -> bytes:
    """The operation, as msgpack has it in a request."""
    return b"\xa2op" + bytes([0xA0 + len(op)]) + op.encode()


class LosingLink(Link):
    """Once one of ``ops`` was asked for, carries no answer any more; nor, if told so, the request.

    `restore` ends the connection; `let_through` carries late what was held.
    """

    def __init__(self, port: int, *ops: str) -> None:
        super().__init__(port)
        self._words = [said(op) for op in ops]
        self._is_losing = self._loses_requests = False
        self.num_lost = 0

    async def _let(self, some: bytes, *, is_request: bool) -> None:
        if is_request and self._is_losing and any(word in some for word in self._words):
            self.num_lost += 1
            self.blacken()
        if not is_request or self._loses_requests:
            await self._passes.wait()

    def lose(self, *, requests: bool = False) -> None:
        """The next one has no answer, or does not even come there."""
        self._is_losing, self._loses_requests = True, requests

    def restore(self) -> None:
        """What is not carried yet never will be; the next connection is a good one."""
        self._is_losing = False
        self.cut()
        self.let_through()

    def let_through(self) -> None:
        """Carry what was held, and all that follows."""
        self._is_losing = self._loses_requests = False
        self.heal()


@asynccontextmanager
async def lossy(agent: AgentProcess, *ops: str) -> AsyncIterator[LosingLink]:
    """A link to the peer socket of ``agent`` that loses, and one to the events that does not.

    The agent binds at `AGENT_HOST`, and says that others reach it at `PROXY_HOST`.
    """
    peer, events = (
        int(agent.settings[key].rsplit(":", 1)[1]) for key in ("peer_bind", "events_bind")
    )
    losing, other = LosingLink(peer, *ops), Link(events)
    await losing.open()
    await other.open()
    try:
        yield losing
    finally:
        agent.started["peer"] = agent.settings["peer_bind"]  # it is looked at without a link
        await losing.close()
        await other.close()
