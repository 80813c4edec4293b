"""Agents that give up soon: shared ones for faults that they survive, fresh ones for the others."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.agents import AgentProcess, Agents, agents_ended
from tests.engines import LARGE, NUM_LARGE_BLOCKS

PREFILL: dict[str, Any] = {"late_read_s": 1.0, "drain_timeout_s": 20.0}
DECODE: dict[str, Any] = {"lease_s": 3.0, "request_timeout_s": 5.0, "drain_timeout_s": 20.0}
TCP: dict[str, Any] = {"env": {"UCX_TLS": "tcp"}}
SLOW_READS: dict[str, Any] = {**TCP, "slice_bytes": 4096}
ONE_POST: dict[str, Any] = {**TCP, "slice_bytes": 64 << 20}
"""Of more than the sockets between two agents hold."""
LONG: dict[str, Any] = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
LONG_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
ONE_BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}
NO_SETTINGS: Mapping[str, Any] = {}


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
