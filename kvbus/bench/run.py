"""A run of cases: its agents, and the time that each case may take."""

import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from kvbus.bench.figures import Figure, Scale
from kvbus.bench.pairs import Bench, running
from kvbus.bench.sheet import Sheet
from kvbus.errors import KVBusError, RequestTimeout
from kvbus.output import waiting_for

CASE_WITHIN_S, ROUND_WITHIN_S = 600.0, 10.0

Case = Callable[[Bench, Scale], Awaitable[list[Figure]]]
Cases = Mapping[str, Case]


def run_cases(
    cases: Cases, names: Sequence[str], scale: Scale, sheet: Sheet, devices: tuple[str, str]
) -> None:
    """``devices`` are those of the prefill and the decode engine.

    Raises `KVBusError`, alone or in groups.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
        anyio.run(_run, {name: cases[name] for name in names}, scale, sheet, devices, Path(folder))


async def _run(
    cases: Cases, scale: Scale, sheet: Sheet, devices: tuple[str, str], folder: Path
) -> None:
    async with AsyncExitStack() as stack:
        with waiting_for("two agents and a process of engines to start"):
            started = running(folder, devices=devices, progress=sheet.progress)
            bench = await stack.enter_async_context(started)
        try:
            for name, case in cases.items():
                sheet.begin(name)
                sheet.progress.begin(f"measuring {name}")
                sheet.show(await _measured(name, case, bench, scale))
        except* KVBusError:
            with sheet.progress.hidden():
                for agent in bench.agents.values():  # shows whether it runs, and its log's end
                    sys.stderr.write(f"{agent.child.lost('runs')}\n")
            raise


async def _measured(name: str, case: Case, bench: Bench, scale: Scale) -> list[Figure]:
    within_s = CASE_WITHIN_S + ROUND_WITHIN_S * scale.rounds
    try:
        with anyio.fail_after(within_s):
            async with bench.opened:
                return await case(bench, scale)
    except TimeoutError as error:
        raise RequestTimeout(f"case '{name}' was not measured within {within_s:g} s") from error
