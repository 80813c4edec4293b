"""Handoffs between two vLLM servers whose block sizes differ, prompts cut into chunks and cached."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.clusters import Cluster, Engine, cluster, prompt_of
from tests.vllm.wirings import Wire

CHUNK = ("--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def started(models: Path, wire: Wire) -> Iterator[Cluster]:
    """Servers with blocks of 32 and 64 tokens."""
    sides = {
        "prefill": Engine(cores="0", block_size=32, flags=CHUNK),
        "decode": Engine(cores="1", block_size=64, flags=CHUNK),
    }
    with cluster(models / "gqa", wire, **sides) as made:
        yield made


@pytest.fixture
def pair(started: Cluster) -> Iterator[Cluster]:
    """The servers, which must hold nothing after each test."""
    yield started
    started.check()


def test_decode_says_what_it_says_alone(pair: Cluster) -> None:
    prompt = prompt_of(200, seed=1)

    tokens = pair.handoff(prompt)

    assert tokens == pair.alone(prompt)
