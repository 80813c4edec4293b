"""Runs chaos: ``python -m tests.chaos --seed 1 --minutes 20``. One line of JSON; 1 if it broke.

world 0: act 0 (no events), calm, act 1, calm, ...    world 1: ...

In a calm all must end, and nothing may remain.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from random import Random

from tests.agents import Agents, agents_ended
from tests.chaos.handoffs import Handoffs
from tests.chaos.ledger import Ledger
from tests.chaos.nemesis import Nemesis
from tests.chaos.schedule import AGENTS, draw_faults, draw_setting
from tests.chaos.world import World

ACT_S = 25.0
ACTS_OF_A_WORLD = 4
NUM_WORKERS = 16
CALM_WITHIN_S = 90.0
LOOK_S = 0.2
FEWEST_CALMS, MORE = 2, 12
"""By so much an agent may have more open: connections come and go."""


class Run:
    """All of it."""

    def __init__(self, seed: int, minutes: float, ledger: Ledger, *, first_act: int = 0) -> None:
        self.seed, self._ledger = seed, ledger
        num_acts = max(1, round(minutes * 60 / ACT_S))
        self._acts = range(first_act, first_act + num_acts)
        self.settings: list[str] = []
        self._used: dict[int, list[Counter[str]]] = {}

    async def run(self) -> None:
        """World by world, until the time is over or nothing more is to be learnt."""
        for number, acts in groupby(self._acts, lambda act: act // ACTS_OF_A_WORLD):
            if not self._ledger.is_over:
                with agents_ended(Agents) as agents:
                    await self._play(agents, number, list(acts))
        self._ledger.judge_consumed()

    async def _play(self, agents: Agents, number: int, acts: list[int]) -> None:
        setting = draw_setting(self.seed, number)
        self.settings.append(str(setting))
        world = World(agents, setting, self._ledger, self.seed)
        try:
            started = time.monotonic()
            await world.open()
            self._ledger.note_longest("world_start", time.monotonic() - started)
            for act in acts:
                if not self._ledger.is_over:
                    await self._act(world, act)
        finally:
            await world.close()

    async def _act(self, world: World, act: int) -> None:
        handoffs = Handoffs(world, self._ledger)
        faults = draw_faults(self.seed, act, ACT_S)
        for link in world.event_links.values():
            if act % 2 == 0:
                link.take_down()
        ends_at = time.monotonic() + ACT_S
        rogues = [asyncio.create_task(rogue.run()) for rogue in world.rogues()]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Nemesis(world, handoffs, self._ledger).run(faults))
            for number in range(NUM_WORKERS):
                random = Random(f"{self.seed}/worker/{act}/{number}")
                tasks.create_task(self._work(handoffs, random, ends_at))
        await self._end(rogues)
        world.heal()
        if self._ledger.is_over:
            return
        started = time.monotonic()
        await self._calm(world)
        self._ledger.note_longest("calm", time.monotonic() - started)
        self._ledger.count("acts")
        self._ledger.say(f"act {act} is over, the last is {self._acts[-1]}")

    async def _work(self, handoffs: Handoffs, random: Random, ends_at: float) -> None:
        while time.monotonic() < ends_at and not self._ledger.is_over:
            await handoffs.one(random)

    async def _end(self, rogues: "list[asyncio.Task[None]]") -> None:
        for rogue in rogues:
            if rogue.done() and rogue.exception():
                self._ledger.violate("rogue_failed", repr(rogue.exception()))
            rogue.cancel()
        await asyncio.gather(*rogues, return_exceptions=True)

    async def _calm(self, world: World) -> None:
        """Everything is up and idle in time, and no free block has changed."""
        for name, engine in world.engines.items():
            try:
                async with asyncio.timeout(CALM_WITHIN_S):
                    await engine.up.wait()
            except TimeoutError:
                self._ledger.violate("not_up", name)
        for name in AGENTS:
            await self._wait_idle(world, name)
        for name, engine in world.engines.items():
            checked = await asyncio.wait_for(engine.ask(0, {"do": "check"}).ended, CALM_WITHIN_S)
            if checked.get("held", 0):
                self._ledger.violate("left_over", f"{name} holds {checked['held']} blocks")
        for name in AGENTS:
            self._look_at_process(name, world.agents[name].pid)

    async def _wait_idle(self, world: World, name: str) -> None:
        deadline = time.monotonic() + CALM_WITHIN_S
        while any((await world.status(name))["counts"].values()):
            if time.monotonic() > deadline:
                counts = (await world.status(name))["counts"]
                self._ledger.violate("left_over", f"{name} holds {counts}")
                return
            await asyncio.sleep(LOOK_S)
        for metric in ("quarantined_blocks", "outstanding_handles", "unreleased_handles"):
            with suppress(AssertionError):  # a prefill agent does not have all of them
                if number := await asyncio.to_thread(world.agents[name].metric, metric):
                    self._ledger.violate("left_over", f"{name}: {metric} is {number}")

    def _look_at_process(self, name: str, pid: int) -> None:
        """In the second half of its life an agent has no more open than in the first."""
        seen = self._used.setdefault(pid, [])
        seen.append(open_in(pid))
        half = len(seen) // 2
        if half < FEWEST_CALMS:
            return
        before, after = ([one.total() for one in some] for some in (seen[:half], seen[half:]))
        if min(after) > max(before) + MORE:
            kinds = f"{dict(seen[0])}, then {dict(seen[-1])}"
            self._ledger.violate("more_and_more", f"{name}: {before} {after}: {kinds}")


def open_in(pid: int) -> Counter[str]:
    """Descriptors of a process, by what they are of, and its threads."""
    kinds = Counter[str](threads=sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()))
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            kinds[str(fd.readlink()).partition("[")[0].rpartition("/")[2]] += 1
    return kinds


def main() -> None:
    """Run, print the line, and end with 1 on any violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--stop-at-first", action="store_true", help="end at the first violation")
    parser.add_argument("--first-act", type=int, default=0, help="begin there, to see one again")
    asked = parser.parse_args()
    ledger = Ledger(asked.seed, stops_at_first=asked.stop_at_first)
    run = Run(asked.seed, asked.minutes, ledger, first_act=asked.first_act)
    asyncio.run(run.run())
    print(ledger.line(minutes=asked.minutes, settings=run.settings), flush=True)
    sys.exit(bool(ledger.violations))


if __name__ == "__main__":
    main()
