"""Agents with short timeouts: shared ones for faults that they survive, and fresh ones."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import pytest

from kvbus.engine import Offer, Outcome
from kvbus.errors import ErrorCode, FetchFailed, RequestRefused
from tests.support.agents import Agents, agents_ended
from tests.support.engines import LARGE, NUM_LARGE_BLOCKS, Engine, begin

COMMON: dict[str, Any] = {"drain_timeout_s": 20.0, "engine_wait_s": 10.0}
PREFILL: dict[str, Any] = {**COMMON, "late_read_s": 1.0}
DECODE: dict[str, Any] = {**COMMON, "lease_s": 3.0, "request_timeout_s": 5.0}
TCP: dict[str, Any] = {"env": {"UCX_TLS": "tcp"}}
SLOW_READS: dict[str, Any] = {**TCP, "slice_bytes": 4096}
ONE_POST: dict[str, Any] = {**TCP, "slice_bytes": 64 << 20}
"""The sockets between two agents hold less than one post."""
LONG: dict[str, Any] = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
LONG_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
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

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"prefill": PREFILL, "decode": DECODE}


@pytest.fixture(scope="package")
def shared() -> Iterator[Started]:
    with agents_ended(Started) as agents:
        agents.both()
        yield agents


@pytest.fixture
def fresh() -> Iterator[Started]:
    with agents_ended(Started) as agents:
        yield agents
        agents.check()


async def completes(
    source: Engine, target: Engine, ends: Collection[ErrorCode] = ENDS_OF_CUT
) -> bool:
    handoff = await begin(source, target, timeout_s=10.0)
    try:
        await handoff.fetch.ended
        assert handoff.has_landed(), "the bytes are wrong"
        assert await handoff.offer.ended is Outcome.COMPLETED
    except FetchFailed as failure:
        if failure.code not in ends:
            raise
        await handoff.fetch.freed
        await end_offer(handoff.offer)
        return False
    return True


async def end_offer(offer: Offer) -> None:
    with suppress(RequestRefused):
        await offer.withdraw()
    await offer.ended


async def works_again(
    source: Engine, target: Engine, ends: Collection[ErrorCode] = ENDS_OF_CUT
) -> None:
    deadline = time.monotonic() + WORKS_WITHIN_S
    while not await completes(source, target, ends):
        assert time.monotonic() < deadline
