"""Pairs of engines with small rings, whose copies can be held up, and made to fail."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Event

from torch import Tensor

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.engine.bounce import CopyBlocks, Direction, HostBlocks, HostOffer
from kvbus.geometry import StatePart, state_group
from tests.agents import AgentProcess
from tests.engines import FULL, make_spec
from tests.host_engines import HostEngine, host_engine
from tests.memories import Memory

NUM_BLOCKS, SIZE = 60, FULL.block_size
TENTH = {"full": NUM_BLOCKS // 10}
STATE = state_group("state", (4, 5), (StatePart("conv", 6, 10), StatePart("norm", 1, 7)))


@dataclass
class Gate:
    """Stops copies in one direction while it is shut, and counts them; they may fail."""

    direction: Direction
    open: Event = field(default_factory=Event)
    raises: BaseException | None = None
    num_begun: int = 0

    def wrap(self, copy: CopyBlocks) -> CopyBlocks:
        def gated(blocks: HostBlocks, view: Tensor, direction: Direction) -> None:
            if direction is self.direction:
                self.num_begun += 1
                if not self.open.wait(60):
                    raise TimeoutError("the gate stayed shut")
                if self.raises is not None:
                    raise self.raises
            copy(blocks, view, direction)

        return gated


@asynccontextmanager
async def two(
    prefill: AgentProcess,
    decode: AgentProcess,
    *,
    rings: tuple[dict[str, int], dict[str, int]] = (TENTH, TENTH),
    wraps: tuple[Callable[[CopyBlocks], CopyBlocks], ...] = (lambda copy: copy,) * 2,
    **more: float,
) -> AsyncIterator[tuple[HostEngine, HostEngine]]:
    """A prefill and a decode engine, each with a cache of ten times its ring."""
    shape = {"memory": Memory(), "num_blocks": NUM_BLOCKS, **more}
    specs = [make_spec(groups=(FULL,)) for _ in range(2)]
    async with (
        host_engine(
            PrefillSession,
            prefill.attach,
            specs[0],
            seed=1,
            ring_blocks=rings[0],
            wrap_copy=wraps[0],
            **shape,
        ) as source,
        host_engine(
            DecodeSession,
            decode.attach,
            specs[1],
            seed=2,
            ring_blocks=rings[1],
            wrap_copy=wraps[1],
            **shape,
        ) as target,
    ):
        yield source, target


async def saved(source: HostEngine, num_tokens: int = SIZE, block: int = 3) -> HostOffer:
    """A request of ``num_tokens`` tokens from ``block`` on, saved and not offered."""
    offer = await source.host.begin("r", num_tokens=num_tokens, wait_s=20.0)
    blocks = -(-num_tokens // SIZE)
    await offer.save(num_tokens, {"full": list(range(block, block + blocks))})
    return offer
