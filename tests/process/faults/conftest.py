"""Agents that give up soon: shared ones for faults that they survive, fresh ones for the others."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from kvbus.engine import Offer
from kvbus.errors import ErrorCode, FetchFailed, RequestRefused
from tests.support.agents import AgentProcess, Agents, agents_ended
from tests.support.engines import LARGE, NUM_LARGE_BLOCKS, Engine, begin

COMMON: dict[str, Any] = {"drain_timeout_s": 20.0, "engine_wait_s": 10.0}
PREFILL: dict[str, Any] = {**COMMON, "late_read_s": 1.0}
DECODE: dict[str, Any] = {**COMMON, "lease_s": 3.0, "request_timeout_s": 5.0}
TCP: dict[str, Any] = {"env": {"UCX_TLS": "tcp"}}
SLOW_READS: dict[str, Any] = {**TCP, "slice_bytes": 4096}
ONE_POST: dict[str, Any] = {**TCP, "slice_bytes": 64 << 20}
"""Of more than the sockets between two agents hold."""
LONG: dict[str, Any] = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
LONG_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
ONE_BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}
NO_SETTINGS: Mapping[str, Any] = {}
WORKS_WITHIN_S = 60.0
"""After a fault; a second or two where cores are free."""
ENDS_OF_CUT = (
    ErrorCode.TIMEOUT,
    ErrorCode.LEASE_EXPIRED,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.PEER_UNREACHABLE,
)


class Started(Agents):
    """Agents with the settings of this folder."""

    def prefill(self, **settings: Any) -> AgentProcess:
        """A prefill agent that is not started yet."""
        agent: AgentProcess = self.prepare("prefill", **{**PREFILL, **settings})
        return agent

    def decode(self, **settings: Any) -> AgentProcess:
        """A decode agent that is not started yet."""
        agent: AgentProcess = self.prepare("decode", **{**DECODE, **settings})
        return agent

    def both(
        self,
        prefill: Mapping[str, Any] = NO_SETTINGS,
        decode: Mapping[str, Any] = NO_SETTINGS,
        **common: Any,
    ) -> tuple[AgentProcess, AgentProcess]:
        """One of each, started."""
        made = self.prefill(**common, **prefill), self.decode(**common, **decode)
        self.start(*made)
        return made


@pytest.fixture(scope="package")
def shared() -> Iterator[Started]:
    """The agents of this folder, ended with its last test."""
    with agents_ended(Started) as agents:
        agents.both()
        yield agents


@pytest.fixture
def fresh() -> Iterator[Started]:
    """Makes agents for one test; those that still live must hold nothing after it."""
    with agents_ended(Started) as agents:
        yield agents
        agents.check()


async def completes(
    source: Engine, target: Engine, ends: Collection[ErrorCode] = ENDS_OF_CUT
) -> bool:
    """Whether one handoff did, with every bit right; one that failed by these changed no more."""
    handoff = await begin(source, target, timeout_s=10.0)
    try:
        await handoff.completed()
    except FetchFailed as failure:
        if failure.code not in ends:
            raise
        await handoff.fetch.freed
        await end_offer(handoff.offer)
        return False
    return True


async def end_offer(offer: Offer) -> None:
    """Withdraw it, unless it has ended."""
    with suppress(RequestRefused):
        await offer.withdraw()
    await offer.ended


async def works_again(
    source: Engine, target: Engine, ends: Collection[ErrorCode] = ENDS_OF_CUT
) -> None:
    """A handoff completes soon; the first tries may find out about what has happened."""
    deadline = time.monotonic() + WORKS_WITHIN_S
    while not await completes(source, target, ends):
        assert time.monotonic() < deadline
