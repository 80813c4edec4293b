"""Makes the faults of a schedule happen in a world, each for its time."""

import asyncio
import time
from random import Random

from tests.chaos.handoffs import Handoffs
from tests.chaos.ledger import Ledger
from tests.chaos.links import Link
from tests.chaos.schedule import Fault
from tests.chaos.world import Engine, World

BURST = 80
"""More than an agent takes at a time."""
AFTERMATH_S = 2.0
"""For so long a fault may be felt."""
DELAY_S = 0.05
TRICKLE_BYTES = 200


class Nemesis:
    """Does each fault of a schedule, unless its target is down by another one."""

    def __init__(self, world: World, handoffs: Handoffs, ledger: Ledger) -> None:
        self._world, self._handoffs, self._ledger = world, handoffs, ledger
        self._busy: set[str] = set()

    async def run(self, faults: list[Fault]) -> None:
        """Until the last one is over, or nothing more can be learnt."""
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                tasks.create_task(self._at_its_time(fault))

    async def _at_its_time(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        if fault.target in self._busy or self._ledger.is_over:
            self._ledger.faults["skipped"] += 1
            return
        self._ledger.faults[fault.kind] += 1
        self._busy.add(fault.target)
        started = time.monotonic()
        try:
            await self._do(fault)
        finally:
            self._busy.discard(fault.target)
            if fault.target in self._world.faults:
                ended = time.monotonic() + AFTERMATH_S
                self._world.faults[fault.target].add(started, ended)

    async def _do(self, fault: Fault) -> None:
        name, world = fault.target, self._world
        link, engine = world.links.get(name), world.engines.get(name)
        match fault.kind:
            case "kill_agent":
                await world.restart(name, kill=True, after_s=fault.for_s)
            case "restart_agent":
                await world.restart(name, kill=False, after_s=0.0)
            case "replace_agent":
                await world.replace(name)
            case "stop_agent":
                world.stop(name)
                await asyncio.sleep(fault.for_s)
                world.go_on(name)
            case "burst":
                random = Random(f"{fault.at_s}")
                await asyncio.gather(*(self._handoffs.one(random) for _ in range(BURST)))
            case kind if engine is not None:
                await self._hurt_engine(kind, engine, fault.for_s)
            case kind if link is not None:
                await self._hurt_link(kind, link, fault.for_s)

    async def _hurt_engine(self, kind: str, engine: Engine, for_s: float) -> None:
        if kind == "kill_engine":
            await engine.kill()
            await engine.start()
        else:
            engine.stop()
            await asyncio.sleep(for_s)
            engine.go_on()

    async def _hurt_link(self, kind: str, link: Link, for_s: float) -> None:
        """For a while, or once where there is no length."""
        match kind:
            case "cut" | "reset":
                link.cut(reset=kind == "reset")
            case "take_down":
                link.take_down()
            case "blacken":
                link.blacken()
            case "delay":
                link.delay(DELAY_S)
            case "trickle":
                link.trickle(TRICKLE_BYTES)
            case "replay":
                self._ledger.count("replayed_bytes_answered", await link.replay())
        if for_s:
            await asyncio.sleep(for_s)
            link.heal()
