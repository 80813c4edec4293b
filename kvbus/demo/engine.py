"""What both demo engines are: a model, its paged cache, a thread that computes.

Refuses to compute two requests at once, as one device would, and to know agents but by the SDK.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from anyio import CapacityLimiter

from kvbus.demo.block_pool import BlockPools
from kvbus.demo.device import device_copy, private_cache, share_of
from kvbus.demo.model import Transformer
from kvbus.demo.model_config import ModelConfig
from kvbus.demo.paged_cache import LayerViews, PagedKV
from kvbus.demo.request_blocks import MostBlocks
from kvbus.demo.shape import Memory
from kvbus.demo.work import EngineSetup, Settled
from kvbus.engine import DecodeSession, KvCache, MemorySession, PrefillSession
from kvbus.engine.bounce import Copier, HostPool, LocalCopier
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, KvPart

ATTACH_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 5.0

T = TypeVar("T")
S = TypeVar("S", PrefillSession, DecodeSession)


@dataclass(slots=True)
class Engine:
    """One engine, attached and registered."""

    setup: EngineSetup
    spec: EngineSpec
    model: Transformer
    kv: PagedKV
    pools: BlockPools
    ring: HostPool | None = None
    copier: Copier | None = None
    _device: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))

    async def compute(self, step: Callable[[], T]) -> T:
        """Run ``step`` in the thread that stands for the device; the event loop goes on."""
        return await anyio.to_thread.run_sync(step, limiter=self._device)

    async def settle(self) -> Settled:
        """Wait, for a while, for blocks that are on their way back."""
        with anyio.move_on_after(SETTLE_TIMEOUT_S):
            await self.pools.all_free()
            if self.ring is not None:
                await self.ring.all_free()
        return Settled(self.pools.num_held + (self.ring.num_held if self.ring else 0))


@contextlib.asynccontextmanager
async def attached_engine(
    setup: EngineSetup, control: type[S], most_blocks: MostBlocks
) -> AsyncIterator[tuple[Engine, S]]:
    """The engine and its control session: one memory session a rank, all in this process.

    ``most_blocks`` says how many blocks of a group one request can need.
    """
    model = Transformer(ModelConfig.of(setup.model))
    spec = engine_spec(setup, model.config)
    num_blocks = {
        group.name: setup.concurrency * most_blocks(group, setup) for group in spec.groups
    }
    layout = KvLayout.parse(setup.side.layout, cross_layer=setup.side.cross_layer)
    async with contextlib.AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                MemorySession(setup.attach_path, spec, rank, attach_timeout_s=ATTACH_TIMEOUT_S)
            )
            for rank in range(spec.num_ranks)
        ]
        ring, copier = None, None
        if setup.side.memory is Memory.SHARED:
            caches = [await rank.allocate(layout, num_blocks=num_blocks) for rank in ranks]
        else:
            caches = [private_cache(spec, rank.rank, layout, num_blocks) for rank in ranks]
            ring = HostPool(share_of(num_blocks, share=setup.ring_share))
            buffers = [await rank.allocate_ring(ring.num_blocks) for rank in ranks]
            copier = LocalCopier(buffers, device_copy(caches))
        session = await stack.enter_async_context(control(setup.attach_path, spec))
        await session.register()
        await session.ready()
        pools = BlockPools(num_blocks, seed=setup.engine_id)
        kv = PagedKV([layer_views(cache) for cache in caches])
        yield Engine(setup, spec, model, kv, pools, ring, copier), session


def engine_spec(setup: EngineSetup, config: ModelConfig) -> EngineSpec:
    """What the other side must know of the engine."""
    groups = tuple(
        GroupSpec(
            name=name,
            layers=layers,
            block_size=setup.side.block_size,
            num_kv_heads=config.cache_heads,
            head_dim=config.cache_dim,
            dtype=str(config.kv_dtype).removeprefix("torch."),
            parts=config.parts,
            window=config.window_of(layers[0]),
        )
        for name, layers in config.groups.items()
    )
    return EngineSpec(
        engine_id=setup.engine_id,
        model=f"kvbus-demo@seed-{setup.model.seed}",
        tp_size=setup.side.tp,
        pp_size=setup.side.pp,
        groups=groups,
    )


def layer_views(cache: KvCache) -> dict[int, LayerViews]:
    """The views of a rank's shared cache as the model takes them, by layer."""
    return {
        layer: {KvPart(part): cache.view(layer, part) for part in region.parts}
        for region in cache.rank.regions
        for layer in region.layers
    }
