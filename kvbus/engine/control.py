"""The control session of an engine: what its scheduler registers, of either role.

Its agent is the engine's home.
"""

import random
from collections.abc import Iterable, Mapping
from typing import Self

from kvbus.engine.session import EngineSession
from kvbus.errors import ErrorCode, KVBusError, LocalError, RequestRefused, RequestTimeout
from kvbus.protocol.engine import AgentRanks, Register

FIRST_S, MOST_S = 0.02, 2.0
"""Pauses of our own choice; an agent may ask for more."""

Others = Mapping[str, Iterable[int]] | Iterable[AgentRanks]
"""Ranks of an engine that are attached to other agents, by the peer endpoint of each agent."""


class BusyPauses:
    """The pauses of one request; it is given up when the next would end after ``deadline``."""

    def __init__(self, deadline: float) -> None:
        self._deadline, self._own_s = deadline, FIRST_S

    def after(self, error: KVBusError, now: float) -> float | None:
        """Seconds to wait; None when ``error`` is another one, or there is no time left.

        Longer from refusal to refusal, so that an agent that stays full is asked ever less.
        """
        if not isinstance(error, RequestRefused) or error.code is not ErrorCode.BUSY:
            return None
        hint = error.detail.get("retry_after_s")
        hint_s = hint if isinstance(hint, int | float) else 0.0
        least_s = max(self._own_s, hint_s)  # in this order: a hint may be no number at all
        self._own_s = min(MOST_S, 2 * self._own_s)
        pause_s = least_s * random.uniform(1.0, 2.0)  # noqa: S311 - no secret
        return pause_s if now + pause_s < self._deadline else None


class ControlSession(EngineSession):
    """The session of an engine's scheduler; its agent is the engine's home."""

    others: tuple[AgentRanks, ...] | None = None
    """Ranks that are attached elsewhere; None while the engine is not registered."""

    async def register(self, *, others: Others = (), access: str | None = None) -> None:
        """Register this session as the engine's control session.

        ``others`` says, for an engine whose ranks are spread over several agents, which ranks are
        attached elsewhere, by the peer endpoint of each agent (``agent.peer_endpoint`` of a memory
        session there). Ranks that are not named are attached here. ``access`` is that of their
        memory sessions; `AgentRanks` name one for each agent, and its ``server_key`` if it has
        keys (``agent.server_key`` of such a session). Raises `RequestRefused`.
        """
        elsewhere = tuple(_agent_ranks(others, access))
        await self.request(
            Register(
                engine=self.engine,
                rank=None,
                others=elsewhere,
                role=self.serves,
            )
        )
        self.others = elsewhere

    async def resume(self, before: Self) -> None:
        """Register the engine again, and wait until it is ready, however long a rank takes."""
        if before.others is not None:
            await self.register(others=before.others)
            while not await self._is_ready():
                pass

    async def _is_ready(self) -> bool:
        """False when it was not within ``request_timeout_s``."""
        try:
            await self.ready()
        except RequestTimeout:
            return False
        return True


def _agent_ranks(others: Others, access: str | None) -> Iterable[AgentRanks]:
    if not isinstance(others, Mapping):
        return others
    if others and access is None:
        raise LocalError("ranks at other agents need the access of their memory sessions")
    return (AgentRanks(at, tuple(ranks), access or "") for at, ranks in others.items())
