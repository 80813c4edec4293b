"""Traced handoffs: one block, one after the other, between processes that note what they do."""

import tempfile
from pathlib import Path

import anyio

from kvbus.bench.cases import running
from kvbus.bench.engines import Bench
from kvbus.bench.figures import Scale
from kvbus.bench.shapes import SMALL, contiguous
from kvbus.bench.trace.hops import COMPLETED, FETCH, TracedHop, traced_hops
from kvbus.bench.trace.recorder import Note, Recorder, read_notes
from kvbus.console import Console

NUM_TRACED, NUM_FIRST = 400, 50


def trace_handoffs(scale: Scale) -> list[TracedHop]:
    """Trace handoffs of one block on a warm route; raises `KVBusError` when one fails."""
    num, skip = scale.count(NUM_TRACED), scale.count(NUM_FIRST)
    with tempfile.TemporaryDirectory(prefix="kvbus-trace-") as folder:
        notes = anyio.run(_trace, num + skip, Path(folder), Console(stderr=True))
    return traced_hops(notes, skip=skip)


async def _trace(num: int, folder: Path, console: Console) -> dict[str, list[Note]]:
    """The notes of each process; those of others are there when it has ended."""
    recorder, names = Recorder(), ("prefill agent", "decode agent", "prefill engine")
    with (
        running(folder, console, notes=folder) as bench,
        console.status("tracing handoffs"),
        recorder.recording(),
    ):
        await _hand_off(bench, recorder, num)
    return {
        **{name: read_notes(folder / f"{name}.notes") for name in names},
        "decode engine": recorder.notes,
    }


async def _hand_off(bench: Bench, recorder: Recorder, num: int) -> None:
    tables = contiguous(1)
    async with bench.engines(SMALL, 2) as pair:
        await pair.verify(tables)
        for _ in range(num):
            (ticket,) = await pair.source.offer(tables)
            recorder.note(FETCH)
            await pair.fetch(ticket, tables)
            recorder.note(COMPLETED)
            await pair.source.ended()
