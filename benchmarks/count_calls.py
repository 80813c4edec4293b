"""Counts the calls and files of one handoff, as one who reads the code follows them.

    python benchmarks/count_calls.py [--rounds 9] [--verbose] [--json]

Three figures: a mapped and a direct fetch of one block on a connected route, and one more tile of a
packed fetch (the difference between fetches of 8 and of 4 tiles, by 4). The agents are real
processes, started by their entry points with a profiler below them; this process is both engines.
What counts:

- all threads of both agents and of both engines, from the decode engine's call of `fetch` until the
  fetch is completed, the offer is released, and the agents are calm. The offer was made before;
- a call of one function by another, once for each such pair in a process, however often it is done;
- functions of the rooms that move a handoff: engine, agent, table, data, both services.
  Neither messaging (bus, protocol) nor arithmetic (geometry, planning, memory), nor properties,
  methods with names like ``__len__``, lambdas and comprehensions. The data processes of the agents
  are not recorded;
- what happens in more than half of the rounds, so no heartbeat.

Beside it stand all calls: of all rooms, properties and the like included, each time that they are
done. A coroutine is called when it starts, not when it resumes.
"""

import argparse
import contextlib
import json
import mmap
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import anyio
from call_recorder import UNFOLLOWED, Call, Recorder

from kvbus.spawn import write_agent_config

ROOMS = (
    "kvbus/agent/",
    "kvbus/data/",
    "kvbus/engine/",
    "kvbus/table/",
    "kvbus_decode/",
    "kvbus_prefill/",
)
RECORDER = Path(__file__).with_name("call_recorder.py")
GROUP, BLOCK_TOKENS = "full", 16
BLOCK_BYTES = 64 << 10
"""A staging slot has room for one, so that a tile is a block."""
FEW_TILES, MANY_TILES = 4, 8
WARM_UP_ROUNDS = 3
CALM_S = 0.05
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunningAgent:
    """An agent's process: where its engine attaches, and where its calls will be."""

    name: str
    role: str
    attach_path: Path
    out: Path

    def rounds(self) -> dict[str, list[Call]]:
        """What it has recorded, once it has ended."""
        found = json.loads(self.out.read_text(encoding="utf-8"))
        return {number: [(call[0], call[1]) for call in calls] for number, calls in found.items()}


@contextlib.contextmanager
def agents(folder: Path, switch: Path) -> Iterator[list[RunningAgent]]:
    """One prefill agent, and decode agents that are named after the path of their reads."""
    started = []
    with contextlib.ExitStack() as stack:
        for name, role, settings in (
            ("prefill", "prefill", {}),
            ("mapped", "decode", {}),
            ("direct", "decode", {"path": "direct"}),
            ("packed", "decode", {"path": "packed"}),
        ):
            settings |= {"slot_bytes": BLOCK_BYTES, "log_level": "warning"}
            config, out = write_agent_config(name, folder, **settings), folder / f"{name}.json"
            arguments = (RECORDER, f"kvbus_{role}", config, switch, out)
            command = [sys.executable, *map(str, arguments)]
            stack.callback(_stop, subprocess.Popen(command))
            started.append(RunningAgent(name, role, folder / name / "attach.sock", out))
        yield started


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def engines(started: Sequence[RunningAgent]) -> AsyncIterator[dict[str, Any]]:
    """The link of an engine with each agent, by the agent's name."""
    from kvbus.engine import Link, RankMemory  # noqa: PLC0415 - torch
    from kvbus.geometry import EngineSpec, GroupSpec, KvLayout  # noqa: PLC0415

    group = GroupSpec(GROUP, (0,), BLOCK_TOKENS, 8, 128, "bfloat16")
    links: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        for agent in started:
            spec = EngineSpec(f"engine-{agent.name}", "model", 1, (group,))
            memory = RankMemory.allocate(spec, 0, KvLayout.parse("NHD"), num_blocks=MANY_TILES)
            link = Link(agent.attach_path, spec, memory=memory, attach_timeout_s=60)
            links[agent.name] = await stack.enter_async_context(link)
        yield links


async def hand_off(
    links: Mapping[str, Any], path: str, num_blocks: int, *, switch: mmap.mmap, number: int
) -> None:
    """One handoff; its fetch is recorded as round ``number``, unless that is 0."""
    num_tokens, blocks = num_blocks * BLOCK_TOKENS, {GROUP: list(range(num_blocks))}
    request_id = f"request-{path}-{number}"
    offer = await links["prefill"].offer(request_id, num_tokens=num_tokens, block_ids=blocks)
    ticket = offer.ticket
    await anyio.sleep(CALM_S)
    switch[0] = number
    fetch = links[path].fetch(ticket, num_tokens=num_tokens, block_ids=blocks)
    fetched = await fetch.ended
    await offer.ended
    await anyio.sleep(CALM_S)
    switch[0] = 0
    if fetched.path != path:
        sys.exit(f"the fetch took the path '{fetched.path}' instead of '{path}'")


async def record(started: Sequence[RunningAgent], switch: Path, rounds: int) -> list[list[str]]:
    """Do all handoffs; the numbers of the rounds of each kind."""
    kinds = ("mapped", 1), ("direct", 1), ("packed", FEW_TILES), ("packed", MANY_TILES)
    numbers: list[list[str]] = [[] for _ in kinds]
    with switch.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 1)
    async with engines(started) as links:
        for turn in range(-WARM_UP_ROUNDS, rounds):
            for kind, (path, num_blocks) in enumerate(kinds):
                number = 1 + turn * len(kinds) + kind if turn >= 0 else 0
                await hand_off(links, path, num_blocks, switch=shared, number=number)
                numbers[kind] += [str(number)] if number else []
    return numbers


Counts = Mapping[tuple[str, Call], float]
"""How often each call was done in each process."""


def median_counts(recorded: Mapping[str, Any], numbers: Sequence[str]) -> Counter[Any]:
    """Of each call the median over the rounds ``numbers``; ``recorded`` are rounds by process."""
    rounds = [
        Counter((process, call) for process, found in recorded.items() for call in found.get(n, ()))
        for n in numbers
    ]
    calls = {call for one in rounds for call in one}
    return +Counter({call: median_low([one[call] for one in rounds]) for call in calls})


def figure(counts: Counts) -> dict[str, Any]:
    """What counts of these calls, as JSON."""
    followed = {
        (process, call): file
        for process, call in counts
        if (file := call[1].partition(":")[0]).startswith(ROOMS)
        and not call[1].endswith(UNFOLLOWED)
    }
    return {
        "calls": len(followed),
        "files": len(set(followed.values())),
        "calls_to_another_file": sum(
            call[0].partition(":")[0] != file for (_, call), file in followed.items()
        ),
        "all_calls": round(sum(counts.values())),
        "all_files": len({call[1].partition(":")[0] for _, call in counts}),
        "by_process": Counter(process for process, _ in followed),
        "all_by_process": _all_by_process(counts),
        "by_file": dict(sorted(Counter(followed.values()).items())),
        "list": sorted(f"{process}: {call[0]} → {call[1]}" for process, call in followed),
    }


def _all_by_process(counts: Counts) -> dict[str, int]:
    """All calls of each process, repeats included."""
    found: Counter[str] = Counter()
    for (process, _), times in counts.items():
        found[process] += round(times)
    return dict(found)


def measure(rounds: int) -> dict[str, Any]:
    """The figures."""
    with tempfile.TemporaryDirectory(prefix="kvbus-calls-") as name:
        switch = Path(name) / "switch"
        switch.write_bytes(b"\0")
        recorder = Recorder(switch)
        recorder.start()
        with agents(Path(name), switch) as started:
            numbers = anyio.run(record, started, switch, rounds)
        recorded = {"engines": recorder.rounds()}
        recorded |= {f"{agent.name} agent": agent.rounds() for agent in started}
    mapped, direct, few, many = (median_counts(recorded, of_kind) for of_kind in numbers)
    tiles = MANY_TILES - FEW_TILES
    more = {call: (many[call] - few[call]) / tiles for call in many}
    of_tile = {call: n for call, n in more.items() if n > 1 / 2}
    fewest = {
        process: min(len(found.get(number, ())) for number in numbers[0])
        for process, found in recorded.items()
    }
    return {
        "mapped fetch": {**figure(mapped), "fewest_by_process": fewest},
        "direct fetch": figure(direct),
        "packed tile": figure(of_tile),
    }


def print_figure(name: str, found: Mapping[str, Any], *, verbose: bool) -> None:
    """Three lines, and all files and calls if they are wanted."""
    print(
        f"{name}: {found['calls']} calls in {found['files']} files, "
        f"{found['calls_to_another_file']} of them to another file "
        f"({found['all_calls']} calls in {found['all_files']} files, all rooms and repeats)"
    )
    print("  " + ", ".join(f"{process} {n}" for process, n in found["by_process"].items()))
    every = ", ".join(f"{process} {n}" for process, n in found["all_by_process"].items())
    print(f"  of all rooms, with repeats: {every}")
    if verbose:
        print("\n".join(f"  {n:4}  {file}" for file, n in found["by_file"].items()))
        print("\n".join(f"        {call}" for call in found["list"]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, choices=range(1, 60), metavar="1..59")
    parser.add_argument("--verbose", action="store_true", help="also all files and calls")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments = parser.parse_args()
    figures = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, found in figures.items():
        print_figure(name, found, verbose=arguments.verbose)


if __name__ == "__main__":
    main()
