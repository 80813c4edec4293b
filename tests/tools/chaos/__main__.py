"""Runs chaos: ``python -m tests.tools.chaos --seed 1 --minutes 20``; it ends with 1 if it broke.

world 0: act 0 (no events), calm, act 1, calm, ...    world 1: ...

In a calm all must end, and nothing may remain. The last line is the result in JSON.

With ``--soak`` there is one world without faults, and an act each minute, or ten of a shorter run.
After each calm a line of JSON has what each agent holds; the result says which agents grow.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from tests.support.agents import Agents, agents_ended
from tests.tools.chaos.draws import Fault, Setting, draw_faults, draw_setting
from tests.tools.chaos.handoffs import Handoffs
from tests.tools.chaos.ledger import Ledger
from tests.tools.chaos.links import Link
from tests.tools.chaos.shapes import AGENTS
from tests.tools.chaos.soak import CAPS, LONGEST_PERIOD_S, NUM_PERIODS, Sample, judge, sample
from tests.tools.chaos.world import World

ACT_S = 25.0
ACTS_OF_A_WORLD = 4
NUM_WORKERS, MANY_WORKERS = 16, 48
BURST = 80
"""More than an agent takes at a time."""
CALM_WITHIN_S = 90.0
CHECK_S = 0.2
FEWEST_CALMS, MORE = 2, 12
"""By so much an agent may have more open: connections come and go."""
HURT_LINK: dict[str, Callable[[Link], None]] = {
    "cut": lambda link: link.cut(),
    "reset": lambda link: link.cut(reset=True),
    "take_down": Link.take_down,
    "blacken": Link.blacken,
    "delay": lambda link: link.delay(0.05),
    "trickle": lambda link: link.trickle(200),
}


async def run(seed: int, acts: Sequence[int], ledger: Ledger, settings: list[str]) -> None:
    """World by world, until the time is over or nothing more is to be learnt."""
    for number, some in groupby(acts, lambda act: act // ACTS_OF_A_WORLD):
        if ledger.is_over:
            return
        setting = draw_setting(seed, number)
        settings.append(str(setting))
        with agents_ended(Agents) as agents:
            world = World(agents, setting, ledger, seed)
            try:
                await world.open()
                for act in some:
                    if not ledger.is_over:
                        await Act(world, ledger, seed, act).run()
                        ledger.say(f"act {act} is over, the last is {acts[-1]}")
            finally:
                await world.close()


async def soak(
    seed: int, seconds: float, caps: str, ledger: Ledger, settings: list[str]
) -> dict[str, dict[str, Any]]:
    """Hand off without faults; return the verdict on each agent."""
    setting = Setting("tcp", keyed=False, maps=True, small_slices=False, digest="off")
    settings.append(str(setting))
    num_acts = max(NUM_PERIODS, round(seconds / LONGEST_PERIOD_S))
    history: dict[str, list[Sample]] = {name: [] for name in AGENTS}
    with agents_ended(Agents) as agents:
        world = World(agents, setting, ledger, seed, CAPS[caps])
        try:
            await world.open()
            for act in range(num_acts):
                await Act(world, ledger, seed, act, seconds / num_acts, hurts=False).run()
                for name, samples in history.items():
                    samples.append(sample(world.agents[name]))
                now = {name: asdict(samples[-1]) for name, samples in history.items()}
                print(json.dumps({"act": act, "agents": now}), flush=True)
        finally:
            await world.close()
    return {name: asdict(judge(samples)) for name, samples in history.items()}


class Act:
    """Handoffs by some workers, and then a calm; by rogues and with faults where it ``hurts``."""

    def __init__(
        self,
        world: World,
        ledger: Ledger,
        seed: int,
        act: int,
        seconds: float = ACT_S,
        *,
        hurts: bool = True,
    ) -> None:
        self._world, self._ledger, self._seed, self._act = world, ledger, seed, act
        self._seconds, self._hurts = seconds, hurts
        self._handoffs = Handoffs(world, ledger, hurts=hurts)
        self._busy: set[str] = set()
        """What is down by a fault."""

    async def run(self) -> None:
        for link in self._world.event_links.values():
            if self._hurts and self._act % 2 == 0:
                link.take_down()
        ends_at = time.monotonic() + self._seconds
        made = self._world.rogues() if self._hurts else []
        rogues = [asyncio.create_task(rogue.run()) for rogue in made]
        async with asyncio.TaskGroup() as tasks:
            for fault in draw_faults(self._seed, self._act, ACT_S) if self._hurts else []:
                tasks.create_task(self._at_its_time(fault))
            for number in range(NUM_WORKERS if self._hurts else MANY_WORKERS):
                random = Random(f"{self._seed}/worker/{self._act}/{number}")
                tasks.create_task(self._work(random, ends_at))
        for rogue in rogues:
            if rogue.done() and rogue.exception():
                self._ledger.violate("rogue_failed", repr(rogue.exception()))
            rogue.cancel()
        await asyncio.gather(*rogues, return_exceptions=True)
        self._world.heal()
        if not self._ledger.is_over:
            await self._calm()
            self._ledger.count("acts")

    async def _work(self, random: Random, ends_at: float) -> None:
        while time.monotonic() < ends_at and not self._ledger.is_over:
            await self._handoffs.one(random)

    async def _at_its_time(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        if fault.target in self._busy or self._ledger.is_over:
            self._ledger.faults["skipped"] += 1
            return
        self._ledger.faults[fault.kind] += 1
        self._busy.add(fault.target)
        try:
            await self._hurt(fault.target, fault)
        finally:
            self._busy.discard(fault.target)

    async def _hurt(self, name: str, fault: Fault) -> None:
        world = self._world
        match fault.kind:
            case "kill_agent":
                await world.restart(name, kill=True, after_s=fault.for_s)
            case "restart_agent":
                await world.restart(name, kill=False, after_s=0.0)
            case "stop_agent":
                world.stop(name)
                await asyncio.sleep(fault.for_s)
                world.go_on(name)
            case "kill_data":
                world.end_data(name, signal.SIGKILL)
            case "abort_data":
                world.end_data(name, signal.SIGABRT)
            case "kill_engine":
                await world.engines[name].kill()
                await world.engines[name].start()
            case "stop_engine":
                world.engines[name].stop()
                await asyncio.sleep(fault.for_s)
                world.engines[name].go_on()
            case "burst":
                random = Random(f"{fault.at_s}")
                await asyncio.gather(*(self._handoffs.one(random) for _ in range(BURST)))
            case kind:
                HURT_LINK[kind](world.links[name])
                if fault.for_s:  # else it is done once
                    await asyncio.sleep(fault.for_s)
                    world.links[name].heal()

    async def _calm(self) -> None:
        """Everything is up and idle in time, and no free block has changed."""
        for name, engine in self._world.engines.items():
            try:
                async with asyncio.timeout(CALM_WITHIN_S):
                    await engine.up.wait()
            except TimeoutError:
                self._ledger.violate("not_up", name)
        for name in AGENTS:
            await self._wait_idle(name)
        for name, engine in self._world.engines.items():
            checked = await asyncio.wait_for(engine.ask(0, {"do": "check"}).ended, CALM_WITHIN_S)
            if checked.get("held", 0):
                self._ledger.violate("left_over", f"{name} holds {checked['held']} blocks")
        for name in AGENTS:
            agent = self._world.agents[name]
            for pid in filter(None, (agent.pid, agent.data_pid)):
                self._look_at_process(name, pid)

    async def _wait_idle(self, name: str) -> None:
        agent, deadline = self._world.agents[name], time.monotonic() + CALM_WITHIN_S
        while any((counts := (await asyncio.to_thread(agent.status))["counts"]).values()):
            if time.monotonic() > deadline:
                self._ledger.violate("left_over", f"{name} holds {counts}")
                return
            await asyncio.sleep(CHECK_S)
        for metric in ("quarantined_blocks", "data_jobs", "pool_used_bytes", "held_offers"):
            with suppress(AssertionError):  # an agent has those of its role
                if number := await asyncio.to_thread(agent.metric, metric):
                    self._ledger.violate("left_over", f"{name}: {metric} is {number}")

    def _look_at_process(self, name: str, pid: int) -> None:
        """In the second half of its life a process has no more open than in the first."""
        seen = self._world.used.setdefault(pid, [])
        seen.append(open_in(pid))
        half = len(seen) // 2
        if half < FEWEST_CALMS:
            return
        before, after = ([one.total() for one in some] for some in (seen[:half], seen[half:]))
        if min(after) > max(before) + MORE:
            kinds = f"{dict(seen[0])}, then {dict(seen[-1])}"
            self._ledger.violate("more_and_more", f"{name}: {before} {after}: {kinds}")


def open_in(pid: int) -> Counter[str]:
    kinds = Counter[str](threads=sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()))
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            kinds[str(fd.readlink()).partition("[")[0].rpartition("/")[2]] += 1
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--stop-at-first", action="store_true", help="end at the first violation")
    parser.add_argument("--first-act", type=int, default=0, help="begin there, to see one again")
    parser.add_argument("--soak", choices=CAPS, help="no faults; how much is kept of the ended")
    wanted = parser.parse_args()
    ledger, settings = Ledger(wanted.seed, stops_at_first=wanted.stop_at_first), list[str]()
    more: dict[str, Any] = {}
    if wanted.soak:
        seconds = wanted.minutes * 60
        verdicts = asyncio.run(soak(wanted.seed, seconds, wanted.soak, ledger, settings))
        more = {"flat": not any(one["grows"] for one in verdicts.values()), "agents": verdicts}
    else:
        num_acts = max(1, round(wanted.minutes * 60 / ACT_S))
        acts = range(wanted.first_act, wanted.first_act + num_acts)
        asyncio.run(run(wanted.seed, acts, ledger, settings))
    print(ledger.line(minutes=wanted.minutes, settings=settings, **more), flush=True)
    sys.exit(bool(ledger.violations) or not more.get("flat", True))


if __name__ == "__main__":
    main()
