"""Agents that take memory of a GPU; every test here is skipped, and says why, where none is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvbus.errors import SegmentError
from kvbus.memory.cuda import check_cuda
from tests.process.handoffs.shapes import ShapedAgents
from tests.support.agents import Agents, agents_ended

READERS = ("auto", "packed")
SLOTS: dict[str, Any] = {"slot_bytes": 64 << 10, "staging_bytes": 8 * (64 << 10)}
WITHIN_S = 240.0
"""For anything that starts CUDA in a new process."""


@pytest.fixture(autouse=True)
def _gpu() -> None:
    try:
        check_cuda()
    except SegmentError as error:
        pytest.skip(f"no GPU for this test: {error.message}")


@pytest.fixture(scope="session")
def shared_gpu_agents() -> Iterator[Agents]:
    """A prefill agent, and a decode agent for each way of reading, ended with the session."""
    with agents_ended(Agents) as agents:
        if torch.cuda.is_available():
            agents.start(agents.prepare("prefill", **SLOTS))
            for path in READERS:
                agents.start(agents.prepare("decode", path=path, **SLOTS))
        yield agents


@pytest.fixture
def shapes(_gpu: None, shared_gpu_agents: Agents) -> Iterator[ShapedAgents]:
    """These agents, which must hold nothing after each test."""
    prefill, *readers = shared_gpu_agents.all
    yield ShapedAgents(prefill, dict(zip(READERS, readers, strict=True)))
    shared_gpu_agents.check()
