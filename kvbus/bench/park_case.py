"""Case ``park``: parking beside memcpy, and handoffs from a pool beside those from the engine."""

from functools import partial
from statistics import median

from kvbus.bench.bench_engine import BIG, PairedBlocks, scattered
from kvbus.bench.figures import Figure, Scale, Ways, in_turn, milliseconds, speed, stages
from kvbus.bench.pairs import UNMAPPED, Bench, Pair, memcpy
from kvbus.errors import KVBusError
from kvbus.lab.process import TimedFetch

NUM_BYTES = 64 << 20
NEVER_S = 86_400.0


async def measure_park(bench: Bench, scale: Scale) -> list[Figure]:
    tables = scattered(scale.count(NUM_BYTES // BIG.block_bytes), BIG)
    num_blocks, num_bytes = tables.capacities[0], len(tables.decode) * BIG.block_bytes
    settings = {"park_bytes": 2 * num_blocks * BIG.block_bytes, "park_after_s": NEVER_S}
    parking = await bench.with_prefill_agent("parking", settings)
    mapped = await parking.pair(BIG, num_blocks)
    far = await parking.pair(BIG, num_blocks, source=mapped.source, label=UNMAPPED)
    pairs, parked = {"mapped": mapped, UNMAPPED: far}, list[tuple[float, TimedFetch]]()
    ways: Ways = {
        "memcpy": memcpy(num_bytes),
        **{f"{one}, from the engine": partial(pairs[one].timed, tables) for one in pairs},
        **{f"{one}, from the pool": partial(_timed, pairs[one], tables, parked) for one in pairs},
    }
    for pair in pairs.values():
        await pair.verify(tables)
        await _verify(pair, tables)
    times = await in_turn(bench.progress.parts(scale.rounds, "rounds"), ways)
    seconds = {name: median(some) for name, some in times.items()} | {
        "parking": median(parked_s for parked_s, _ in parked)
    }
    slower = {
        one: seconds[f"{one}, from the pool"] / seconds[f"{one}, from the engine"] for one in pairs
    }
    return [
        Figure("parking vs memcpy", seconds["memcpy"] / seconds["parking"], "x", least=0.8),
        *(Figure(f"{one}: pool vs engine", by, "x", most=1.1) for one, by in slower.items()),
        *(speed(name, num_bytes, some) for name, some in seconds.items()),
        *(milliseconds(f"{name} p50", some) for name, some in seconds.items()),
        *stages([one for _, one in parked if one.fetched.path == "mapped"], "  from the pool: "),
    ]


async def _timed(pair: Pair, tables: PairedBlocks, parked: list[tuple[float, TimedFetch]]) -> float:
    (ticket,) = await pair.source.offer(tables)
    parked_s = await pair.source.park()
    fetched = await pair.reader.fetch_timed(ticket, tables)
    parked.append((parked_s, fetched))
    await pair.source.ended()
    return fetched.seconds


async def _verify(pair: Pair, tables: PairedBlocks) -> None:
    """Compare every byte of one handoff, which connects to the pool."""
    pair.reader.wipe()
    await _timed(pair, tables, [])
    if not pair.reader.has(tables, pair.source.shape):
        raise KVBusError("a handoff from a pool brought wrong bytes")
