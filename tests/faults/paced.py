"""Handoffs at a steady rate between engines that keep their sessions, blocking and async ones.

Refuses none: each handoff that fails, is late or has other bytes is kept, with its reason.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import torch

from kvbus.engine import (
    BlockingDecode,
    BlockingMemory,
    BlockingPrefill,
    DecodeSession,
    KvCache,
    PrefillSession,
)
from kvbus.errors import KVBusError
from kvbus.geometry import KvPart
from kvbus.protocol import Outcome
from tests.engines import FULL, NHD, make_spec
from tests.faults.kept_engines import KeptEngine
from tests.strict_sessions import bits

BLOCKS_EACH = 4
NUM_TOKENS = BLOCKS_EACH * FULL.block_size


@dataclass
class Tally:
    """What became of the handoffs; ``failures`` say of each that was not good why."""

    took_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def percentile_s(self, share: float) -> float:
        """The time that this share of the handoffs took at most."""
        return sorted(self.took_s)[min(len(self.took_s) - 1, int(share * len(self.took_s)))]


@dataclass
class BlockingPair:
    """A prefill and a decode engine without an event loop."""

    source: BlockingPrefill
    target: BlockingDecode
    given: KvCache
    taken: KvCache
    tally: Tally

    def run(self, number: int, period_s: float) -> None:
        """Handoffs in this thread, one each period, between blocks of its own."""
        blocks = list(range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH))
        turn, due = 0, time.monotonic()
        while not self.tally.is_over.is_set():
            turn, due = turn + 1, due + period_s
            began = time.monotonic()
            sent = pattern(number, turn)
            _write(self.given, blocks, sent)
            try:
                self._hand_over(f"blocking-{number}-{turn}", blocks)
            except KVBusError as error:
                self.tally.failures.append(f"blocking {number}-{turn}: {error.code}: {error}")
            else:
                self.tally.took_s.append(time.monotonic() - began)
                if not _holds(self.taken, blocks[::-1], sent):
                    self.tally.failures.append(f"blocking {number}-{turn}: other bytes")
            self.tally.is_over.wait(max(0.0, due - time.monotonic()))

    def _hand_over(self, request_id: str, blocks: list[int]) -> None:
        offer = self.source.offer(request_id, num_tokens=NUM_TOKENS, block_ids={FULL.name: blocks})
        fetch = self.target.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, block_ids={FULL.name: blocks[::-1]}
        )
        self.target.wait_completed(fetch)
        outcome = self.source.wait_released(offer)
        if outcome is not Outcome.COMPLETED:
            raise KVBusError(f"the offer was {outcome}")


@contextmanager
def blocking_pair(
    prefill: Path, decode: Path, num_blocks: int, tally: Tally
) -> Iterator[BlockingPair]:
    """Engines that come back to their agents, or follow them, at these attach paths."""
    specs = make_spec(), make_spec()
    with ExitStack() as stack:
        enter = stack.enter_context
        memories = [
            enter(BlockingMemory(path, spec, 0, reconnect=True))
            for path, spec in zip((prefill, decode), specs, strict=True)
        ]
        given, taken = (memory.allocate(NHD, num_blocks=num_blocks) for memory in memories)
        source = enter(BlockingPrefill(prefill, specs[0], reconnect=True))
        target = enter(BlockingDecode(decode, specs[1], reconnect=True))
        for session in (source, target):
            session.register()
            session.ready()
        yield BlockingPair(source, target, given, taken, tally)


async def run_async(
    source: KeptEngine[PrefillSession],
    target: KeptEngine[DecodeSession],
    number: int,
    period_s: float,
    tally: Tally,
) -> None:
    """As `BlockingPair.run`, in an event loop."""
    blocks = list(range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH))
    turn, due = 0, time.monotonic()
    while not tally.is_over.is_set():
        turn, due = turn + 1, due + period_s
        began = time.monotonic()
        sent = pattern(number, turn)
        source.write(blocks, sent)
        try:
            offer = await (await source.control.opened()).offer(
                f"async-{number}-{turn}", num_tokens=NUM_TOKENS, block_ids={FULL.name: blocks}
            )
            fetch = (await target.control.opened()).fetch(
                offer.ticket, num_tokens=NUM_TOKENS, block_ids={FULL.name: blocks[::-1]}
            )
            await fetch.completed()
            outcome = await offer.released()
        except KVBusError as error:
            tally.failures.append(f"async {number}-{turn}: {error.code}: {error}")
        else:
            tally.took_s.append(time.monotonic() - began)
            if not target.holds(blocks[::-1], sent) or outcome is not Outcome.COMPLETED:
                tally.failures.append(f"async {number}-{turn}: other bytes, or {outcome}")
        await anyio.sleep(max(0.0, due - time.monotonic()))


def pattern(number: int, turn: int) -> torch.Tensor:
    """What a handoff sends: another value for each token, worker and turn."""
    tokens = torch.arange(NUM_TOKENS).reshape(BLOCKS_EACH, -1, 1, 1)
    return (tokens * 7 + turn * 101 + number * 3001).to(torch.int16)


def _write(cache: KvCache, block_ids: list[int], values: torch.Tensor) -> None:
    for view in _views(cache):
        view[block_ids] = values


def _holds(cache: KvCache, block_ids: list[int], values: torch.Tensor) -> bool:
    return all(bool((view[block_ids] == values).all()) for view in _views(cache))


def _views(cache: KvCache) -> list[torch.Tensor]:
    parts = (KvPart.KEY, KvPart.VALUE)
    return [bits(cache.view(layer, part)) for layer in FULL.layers for part in parts]
