"""How long after the end of a prefill its KV has arrived, when chunks were read as they were ready.

Refuses to time the prefill: its chunks are of equal size, each computed by waiting.
"""

import time
from statistics import median

from kvbus.bench.effort import Effort
from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Target
from kvbus.bench.shapes import LAYERED, Tables, scattered

CASE = "chunked"
NUM_CHUNKS = 8
NUM_BLOCKS = (64 << 20) // LAYERED.block_bytes
CHUNK_S = 0.03
OF_WHOLE = Target(0.5)


async def measure_chunked(bench: Bench, effort: Effort) -> list[Figure]:
    """In turn: a prefill of one chunk, and one of eight."""
    num_blocks = effort.count(NUM_BLOCKS, at_least=NUM_CHUNKS)
    tables = scattered(num_blocks, LAYERED)
    times: dict[int, list[float]] = {1: [], NUM_CHUNKS: []}
    async with bench.engines(LAYERED, 2 * num_blocks) as pair:
        await pair.verify(tables)
        for _ in range(effort.rounds):
            for num_chunks, seconds in times.items():
                seconds.append(await _handover_s(pair, tables, num_chunks))
    whole_s, chunked_s = (median(seconds) for seconds in times.values())
    return [
        Figure(CASE, "of the time without", chunked_s / whole_s, "", OF_WHOLE),
        Figure(CASE, "end of prefill to end of fetch", chunked_s * 1e3, "ms"),
        Figure(CASE, "the same without chunks", whole_s * 1e3, "ms"),
    ]


async def _handover_s(pair: EnginePair, tables: Tables, num_chunks: int) -> float:
    """From when the last chunk was ready until the fetch is complete.

    Both processes are on one machine, whose monotonic clock they share.
    """
    chunk_s = CHUNK_S * NUM_CHUNKS / num_chunks
    ticket = await pair.compute(tables, num_chunks, chunk_s)
    await pair.fetch(ticket, tables)
    completed_at = time.perf_counter()
    (ready_at,) = await pair.ready_times()
    return completed_at - ready_at
