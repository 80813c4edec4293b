"""Hands off at full rate for long, and says whether the agents grow: ``make soak MINUTES=60``.

A line of JSON each minute, or ten of a shorter run, with what each agent has while nothing is
on its way. The last line is the verdict; the exit status is 1 when an agent grows.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from kvbus.bench.engines import READERS, Bench
from kvbus.bench.processes import agent, answering
from kvbus.errors import KVBusError, leaves
from kvbus.keys import Role
from tests.soak.load import STREAMS, load
from tests.soak.look import look
from tests.soak.verdict import Sample, judge


class Caps(StrEnum):
    """How much the agents keep of what has ended: the least that they take, or what they do."""

    SMALL = "small"
    DEFAULT = "default"


SETTINGS: Mapping[Caps, dict[str, int]] = {
    Caps.SMALL: {"max_ended_bytes": 1 << 20, "max_reply_bytes": 17 << 20},
    Caps.DEFAULT: {},
}
PATIENT: Mapping[Role, dict[str, Any]] = {
    Role.PREFILL: {"max_lease_s": 300.0},
    Role.DECODE: {"request_timeout_s": 60.0, "fetch_timeout_s": 300.0, "lease_s": 300.0},
}
"""A machine that is busy with other things is no leak."""
LONGEST_PERIOD_S = 60.0
NUM_PERIODS = 10
History = dict[str, list[Sample]]


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the load lasts.")] = 1.0,
    caps: Annotated[Caps, typer.Option(help="What is kept of ended handoffs.")] = Caps.SMALL,
    seed: Annotated[int, typer.Option(help="Sizes and cancels are drawn from it.")] = 1,
) -> None:
    """Soak, and judge."""
    try:
        history = anyio.run(soak, 60 * minutes, SETTINGS[caps], seed)
    except* KVBusError as errors:
        for error in leaves(errors):
            told = "\n".join([f"error: {error}", *getattr(error, "__notes__", [])])
            sys.stderr.write(f"{told}\n")
        sys.exit(1)
    verdicts = {name: judge(samples) for name, samples in history.items()}
    is_flat = not any(one.grows for one in verdicts.values())
    agents = {name: asdict(one) for name, one in verdicts.items()}
    _tell({"flat": is_flat, "caps": caps, "minutes": minutes, "seed": seed, "agents": agents})
    sys.exit(not is_flat)


async def soak(seconds: float, settings: dict[str, Any], seed: int) -> History:
    """The samples of each agent; raises `KVBusError` if a handoff fails or an error is logged."""
    settings = {**settings, "log_level": "error"}  # a line for each handoff would fill a disk
    with tempfile.TemporaryDirectory(prefix="kvs-") as name, ExitStack() as stack:
        folder = Path(name)
        sources = PATIENT[Role.PREFILL] | settings
        agents = {"prefill": stack.enter_context(agent("prefill", folder, settings=sources))}
        for label in dict.fromkeys(stream.reader for stream in STREAMS):
            readers = PATIENT[Role.DECODE] | settings | READERS[label]
            one = agent("decode", folder, label=label, settings=readers)
            agents[label] = stack.enter_context(one)
        path = str(agents["prefill"].attach_path)
        module = "kvbus.bench.prefill_engine"
        engines = stack.enter_context(answering("prefill engine", module, path, folder=folder))
        return await _soak(Bench(agents, engines, folder, stack), seconds, seed)


async def _soak(bench: Bench, seconds: float, seed: int) -> History:
    history: History = {name: [] for name in bench.agents}
    num_periods = max(NUM_PERIODS, round(seconds / LONGEST_PERIOD_S))
    async with load(bench, seed) as handoffs:
        await handoffs.verify()
        began = time.monotonic()
        for _ in range(num_periods):
            await handoffs.run_for(seconds / num_periods)
            for name, one in bench.agents.items():
                history[name].append(await look(one))
            now = {name: asdict(samples[-1]) for name, samples in history.items()}
            lasted_s = round(time.monotonic() - began, 1)
            _tell({"seconds": lasted_s, "ended": handoffs.counts, "agents": now})
        await handoffs.verify()
    for one in bench.agents.values():
        if one.child.log_text():
            raise one.child.lost("logged errors")
    return history


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
