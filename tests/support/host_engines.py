"""Engines whose cache is private memory, as a device's would be, and goes through host blocks.

They take the calls of engines whose memory is mapped, so that what is shown for one is shown for
the other.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from kvbus.engine.bounce import HostFetch, HostLink, HostPool
from kvbus.errors import ClosedError
from kvbus.geometry import EngineSpec, KvPart
from kvbus.lab.lab_engine import Offered, device_copy
from tests.support.agents import until
from tests.support.engines import Engine, StrictEngine
from tests.support.memories import Memory, NumBlocks, by_group
from tests.support.strict_links import bits


@dataclass
class HostEngine(Engine):
    """``caches`` are the device's; ``through`` copies between them and the host blocks."""

    copies_on: ClassVar[bool] = True
    through: StrictEngine

    @property
    def ring(self) -> HostPool:
        assert self.through.ring is not None
        return self.through.ring

    @property
    def host(self) -> HostLink:
        assert self.through.host is not None
        return self.through.host

    @property
    def prefill(self) -> "HostEngine":
        return self

    @property
    def decode(self) -> "HostEngine":
        return self

    def first_read(self, block_id: int) -> Tensor:
        """The first host block: free until the fetch, and zeroed here."""
        del block_id
        return bits(self.through.mapped[0].view(0, KvPart.KEY))[0].zero_()

    def fetch(self, ticket: Mapping[str, Any], **more: Any) -> HostFetch:
        """As `Link.fetch`."""
        fetch = self.through.fetch(ticket, **more).fetch
        assert isinstance(fetch, HostFetch)
        return fetch

    async def offer(self, request_id: str, *, sealed: bool = True, **more: Any) -> Offered:
        """As `Link.offer`; one that is not sealed will have ``total`` tokens."""
        total = None if sealed else self.total
        offered = await self.through.offer(request_id, total=total, **more)
        if offered.saved is not None:
            await offered.saved
        return offered


@asynccontextmanager
async def host_engine(
    attach: Path,
    spec: EngineSpec,
    *,
    memory: Memory,
    num_blocks: NumBlocks,
    seed: int = 0,
    ring_blocks: Mapping[str, int] | None = None,
    wait_s: float = 20.0,
    wrap_copy: Any = lambda copy: copy,
    **options: Any,
) -> AsyncIterator[HostEngine]:
    """A registered engine, all of it in this process, its cache full of random bits.

    ``ring_blocks`` are as many as the cache has if not told otherwise, ``options`` the link's.
    """
    through = StrictEngine(
        attach,
        spec,
        memory,
        num_blocks=num_blocks,
        ring_blocks=ring_blocks or by_group(spec, num_blocks),
        copy_of=lambda caches: wrap_copy(device_copy(caches)),
        wait_s=wait_s,
        **options,
    )
    async with through:
        made = HostEngine(spec, through.link, through.caches, num_blocks, through)
        if seed:
            made.fill(seed)
        yield made
        if not isinstance(through.link.problem, ClosedError):
            await until(lambda: made.ring.num_held == 0)
            through.link.check_at_end()
