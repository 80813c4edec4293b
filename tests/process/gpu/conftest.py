"""Agents with memory of a GPU, or of the fake driver's (`test_gpus_on_fake.py`); else skipped."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvbus.errors import SegmentError
from kvbus.memory import cuda
from tests.process.gpu.fake import ON_FAKE, on_fake
from tests.process.handoffs.shapes import ShapedAgents
from tests.support.agents import Agents, agents_ended

READERS = ("auto", "packed")
SLOTS: dict[str, Any] = {
    "slot_bytes": 64 << 10,
    "staging_bytes": 8 * (64 << 10),
    "mapped": True,
}
POOL: dict[str, Any] = {"park_bytes": 2 << 20, "park_after_s": 3600.0}
WITHIN_S = 240.0
"""For anything that starts CUDA in a new process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with warnings.catch_warnings():
        # torch with CUDA, on the fake driver
        warnings.filterwarnings("ignore", "CUDA initialization", UserWarning)
        has_cuda = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("needs_torch_cuda") and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="no GPU for this test: torch has no CUDA"))


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        cuda.seen_gpus()
    except SegmentError as error:
        pytest.skip(f"no GPU for this test: {error.message}")
    if ON_FAKE:
        on_fake(monkeypatch)


@pytest.fixture(scope="session")
def shared_gpu_agents() -> Iterator[Agents]:
    """A prefill agent, and a decode agent for each way of reading, ended with the session."""
    with agents_ended(Agents) as agents:
        agents.start(agents.prepare("prefill", **POOL, **SLOTS))
        for path in READERS:
            agents.start(agents.prepare("decode", path=path, digest="full", **SLOTS))
        yield agents


@pytest.fixture
def shapes(_gpu: None, shared_gpu_agents: Agents) -> Iterator[ShapedAgents]:
    """These agents, which must hold nothing after each test."""
    prefill, *readers = shared_gpu_agents.all
    yield ShapedAgents(prefill, dict(zip(READERS, readers, strict=True)))
    shared_gpu_agents.check()
