"""Agents that tests of this folder share: for engines that are alike, and for others.

Those that a test ends, stops or starts again are its own.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.handoffs.shapes import PATHS, SLOT_BYTES, ShapedAgents
from tests.support.agents import AgentProcess, Agents, agents_ended, started

POOL_BYTES = 2 << 20
"""For each engine; offers are parked on request."""
SLOTS: dict[str, Any] = {"slot_bytes": SLOT_BYTES, "staging_bytes": 4 * SLOT_BYTES}
"""Few and small ones, so that a few tokens are many tiles."""


@pytest.fixture(scope="package")
def shared() -> Iterator[Agents]:
    with started("prefill", "decode", "decode") as agents:
        yield agents


@pytest.fixture
def other_decode(agents: Agents) -> AgentProcess:
    return agents.all[2]


@pytest.fixture(scope="package")
def shaped() -> Iterator[Agents]:
    with agents_ended(Agents) as agents:
        few_at_once = 2  # side by side they are too slow on few cores
        pool: dict[str, Any] = {"park_bytes": POOL_BYTES, "park_after_s": 3600.0}
        wanted = [agents.prepare("prefill", log_level="debug", **pool, **SLOTS) for _ in range(2)]
        for path in (*PATHS, "auto"):
            reads: dict[str, Any] = {
                "path": path,
                "mapped": path == "mapped",
                "digest": "full",
                **SLOTS,
            }
            wanted += [agents.prepare("decode", **reads) for _ in range(1 + (path != "auto"))]
        for at in range(0, len(wanted), few_at_once):
            agents.start(*wanted[at : at + few_at_once])
        yield agents


@pytest.fixture
def shapes(shaped: Agents) -> Iterator[ShapedAgents]:
    *pairs, auto = shaped.all
    names = ("prefill", *PATHS)
    first, second = (dict(zip(names, pairs[at::2], strict=True)) for at in range(2))
    yield ShapedAgents(first.pop("prefill"), {**first, "auto": auto}, second)
    shaped.check()
