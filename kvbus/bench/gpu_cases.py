"""Cases of ``kvbus bench --device``: handoffs between GPUs, beside bare copies of the driver.

mapped   GPU ──one copy──▶ GPU
packed   GPU ──▶ pinned slots ──READ──▶ pinned slots ──▶ GPU
"""

import sys
import time
from collections.abc import Mapping
from functools import cache, partial
from statistics import median

from kvbus.bench.bench_engine import (
    BIG,
    HND_1,
    LAYERED,
    NHD_1,
    NHD_2,
    SMALL,
    PairedBlocks,
    Shape,
    contiguous,
    scattered_tokens,
)
from kvbus.bench.figures import (
    Figure,
    Scale,
    Ways,
    in_turn,
    milliseconds,
    percentiles,
    speed,
    stages,
)
from kvbus.bench.pairs import Bench, Pair
from kvbus.bench.run import Cases
from kvbus.memory.cuda import PinnedMemory, VramMemory, driver
from kvbus.spec_text import gpu_number

MAX_BYTES, SHARE_OF_FREE = 2 << 30, 10
"""The limit of a handoff: three caches of twice its bytes, and two buffers, are on the GPU."""
NUM_SMALL = 1000

DEVICE_COPY, TO_HOST, TO_GPU = "device copy", "pinned copy to host", "pinned copy to GPU"
MAPPED, PACKED = "mapped", "packed"


async def measure_gpu_transfer(
    bench: Bench, scale: Scale, *, source: Shape, target: Shape, in_order: bool = False
) -> list[Figure]:
    most_bytes = min(MAX_BYTES, _free_bytes(bench) // SHARE_OF_FREE)
    num_blocks = scale.count(most_bytes // source.block_bytes)
    tables = _tables(source, target, num_blocks, in_order=in_order)
    num_bytes = num_blocks * source.block_bytes
    pairs = await _pairs(bench, source, target, tables)
    limits = Limits(bench, num_bytes)
    ways: Ways = {
        **{name: partial(pair.timed, tables) for name, pair in pairs.items()},
        DEVICE_COPY: limits.device_copy_s,
        TO_HOST: limits.to_host_s,
        TO_GPU: limits.to_gpu_s,
    }
    times = await in_turn(bench.progress.parts(scale.rounds, "rounds"), ways)
    seconds = {name: median(some) for name, some in times.items()}
    return [
        *_ratios(seconds, is_one_gpu=bench.devices[0] == bench.devices[1]),
        *(speed(name, num_bytes, some) for name, some in seconds.items()),
        *(milliseconds(f"{name} p50", some) for name, some in seconds.items()),
        *(one for name, pair in pairs.items() for one in stages(pair.fetches, f"  {name}: ")),
    ]


async def measure_one_block(bench: Bench, scale: Scale) -> list[Figure]:
    tables = contiguous(1, SMALL)
    pairs = await _pairs(bench, SMALL, SMALL, tables)
    limits = Limits(bench, SMALL.block_bytes)
    ways: Ways = {
        **{name: partial(pair.timed, tables) for name, pair in pairs.items()},
        DEVICE_COPY: limits.device_copy_s,
    }
    rounds = bench.progress.parts(scale.count(NUM_SMALL), "rounds")
    times = await in_turn(rounds, ways)
    return [one for name, some in times.items() for one in percentiles(name, some)]


def _tables(source: Shape, target: Shape, num_blocks: int, *, in_order: bool) -> PairedBlocks:
    if in_order:
        return contiguous(num_blocks, source)
    return scattered_tokens(source, target, num_blocks * source.block)


async def _pairs(
    bench: Bench, source: Shape, target: Shape, tables: PairedBlocks
) -> dict[str, Pair]:
    """Return pairs by the path that they use; every byte of a handoff of each was compared."""
    num_source, num_target = tables.capacities
    engine = await bench.source(source, num_source)
    found = dict[str, Pair]()
    for label in ("", PACKED):
        pair = await bench.pair(target, num_target, source=engine, label=label)
        await pair.verify(tables)
        await pair.timed(tables)
        found[pair.fetches.pop().fetched.path] = pair
    if MAPPED not in found:
        with bench.progress.hidden():
            sys.stderr.write(
                "the GPUs' memory is not mapped: kvbus doctor --only cuda has the reason\n"
            )
    return found


def _ratios(seconds: Mapping[str, float], *, is_one_gpu: bool) -> list[Figure]:
    pinned_s = max(seconds[TO_HOST], seconds[TO_GPU])
    figures = [
        Figure(f"{PACKED} vs the slower pinned copy", pinned_s / seconds[PACKED], "x", least=0.8)
    ]
    if MAPPED in seconds:
        ratio, least = seconds[DEVICE_COPY] / seconds[MAPPED], 0.7 if is_one_gpu else None
        figures.insert(0, Figure(f"{MAPPED} vs {DEVICE_COPY}", ratio, "x", least=least))
    return figures


class Limits:
    """Copies by the driver, between buffers of this process. They block."""

    def __init__(self, bench: Bench, num_bytes: int) -> None:
        source, target = _ordinals(bench)
        self._num_bytes = num_bytes
        self._source, self._target = VramMemory(num_bytes, source), VramMemory(num_bytes, target)
        self._pinned = PinnedMemory(num_bytes, source)

    async def device_copy_s(self) -> float:
        return self._timed_s(self._target.ordinal, self._target.address, self._source.address)

    async def to_host_s(self) -> float:
        return self._timed_s(self._source.ordinal, self._pinned.address, self._source.address)

    async def to_gpu_s(self) -> float:
        return self._timed_s(self._target.ordinal, self._target.address, self._pinned.address)

    def _timed_s(self, ordinal: int, target: int, source: int) -> float:
        stream = _stream(ordinal)
        began = time.perf_counter()
        with driver.on_gpu(ordinal):
            driver.copy_async(target, source, self._num_bytes, stream)
            driver.synchronize(stream)
        return time.perf_counter() - began


@cache
def _stream(ordinal: int) -> int:
    with driver.on_gpu(ordinal):
        return driver.new_stream()


def _ordinals(bench: Bench) -> list[int]:
    return [gpu_number(device) or 0 for device in bench.devices]


def _free_bytes(bench: Bench) -> int:
    return min(map(driver.free_bytes, _ordinals(bench)))


GPU_CASES: Cases = {
    "contiguous": partial(measure_gpu_transfer, source=BIG, target=BIG, in_order=True),
    "scattered-256k": partial(measure_gpu_transfer, source=BIG, target=BIG),
    "scattered-16k": partial(measure_gpu_transfer, source=LAYERED, target=LAYERED),
    "tp-1-to-2": partial(measure_gpu_transfer, source=NHD_1, target=NHD_2),
    "hnd-to-nhd": partial(measure_gpu_transfer, source=HND_1, target=NHD_1),
    "one-block": measure_one_block,
}
