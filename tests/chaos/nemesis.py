"""Makes the faults of a schedule happen in a world, each for its time."""

import asyncio
import time
from random import Random

from tests.chaos.handoffs import Handoffs
from tests.chaos.ledger import Ledger
from tests.chaos.schedule import Fault
from tests.chaos.world import World

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
            await getattr(self, f"_{fault.kind}")(fault)
        finally:
            self._busy.discard(fault.target)
            if fault.target in self._world.faults:
                ended = time.monotonic() + AFTERMATH_S
                self._world.faults[fault.target].add(started, ended)

    async def _kill_agent(self, fault: Fault) -> None:
        await self._world.restart(fault.target, kill=True, after_s=fault.for_s)

    async def _restart_agent(self, fault: Fault) -> None:
        await self._world.restart(fault.target, kill=False, after_s=0.0)

    async def _replace_agent(self, fault: Fault) -> None:
        await self._world.replace(fault.target)

    async def _stop_agent(self, fault: Fault) -> None:
        self._world.stop(fault.target)
        await asyncio.sleep(fault.for_s)
        self._world.go_on(fault.target)

    async def _kill_engine(self, fault: Fault) -> None:
        engine = self._world.engines[fault.target]
        await engine.kill()
        await engine.start()

    async def _stop_engine(self, fault: Fault) -> None:
        engine = self._world.engines[fault.target]
        engine.stop()
        await asyncio.sleep(fault.for_s)
        engine.go_on()

    async def _cut(self, fault: Fault) -> None:
        self._world.links[fault.target].cut()

    async def _reset(self, fault: Fault) -> None:
        self._world.links[fault.target].cut(reset=True)

    async def _take_down(self, fault: Fault) -> None:
        self._world.links[fault.target].take_down()
        await self._then_heal(fault)

    async def _blacken(self, fault: Fault) -> None:
        self._world.links[fault.target].blacken()
        await self._then_heal(fault)

    async def _delay(self, fault: Fault) -> None:
        self._world.links[fault.target].delay(DELAY_S)
        await self._then_heal(fault)

    async def _trickle(self, fault: Fault) -> None:
        self._world.links[fault.target].trickle(TRICKLE_BYTES)
        await self._then_heal(fault)

    async def _then_heal(self, fault: Fault) -> None:
        await asyncio.sleep(fault.for_s)
        self._world.links[fault.target].heal()

    async def _replay(self, fault: Fault) -> None:
        num_bytes = await self._world.links[fault.target].replay()
        self._ledger.count("replayed_bytes_answered", num_bytes)

    async def _burst(self, fault: Fault) -> None:
        random = Random(f"{fault.at_s}")
        await asyncio.gather(*(self._handoffs.one(random) for _ in range(BURST)))
