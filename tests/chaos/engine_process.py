"""An engine of a chaos run, in a process of its own: it does what the world says, and tells all.

    world ──lines of JSON: offer, withdraw, fetch, cancel, check──▶ engine
    world ◀──up, down, offered, over, fetched, freed, violation── engine

It opens its sessions again when its agent was lost. It ends when the world does.
"""

import asyncio
import ctypes
import faulthandler
import json
import os
import signal
import traceback
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import torch

from kvbus.errors import KVBusError
from tests.chaos.decode_side import DecodeSide
from tests.chaos.engine_memory import EngineMemory
from tests.chaos.prefill_side import PrefillSide
from tests.chaos.shapes import BY_NAME, Shape
from tests.chaos.strictness import ChaosDecode, ChaosPrefill

REOPEN_S = 0.2
ATTACH_WITHIN_S = 5.0
MAX_LINE_BYTES = 1 << 24
PR_SET_PDEATHSIG = 1


def main(name: str, attach: str, world: str, seed: int) -> None:
    """Run until the world hangs up; ``world`` is the path of its socket."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    torch.set_num_threads(1)
    anyio.run(EngineProcess(BY_NAME[name], Path(attach), seed).run, world)


class EngineProcess:
    """One engine: its memory, its sessions one after the other, and its orders."""

    def __init__(self, shape: Shape, attach: Path, seed: int) -> None:
        self.shape, self.attach = shape, attach
        self.memory = EngineMemory(shape, attach, self.report, seed)
        self._side: PrefillSide | DecodeSide | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, world: str) -> None:
        """Until the world hangs up; what is open then is left to the kernel."""
        reader, self._writer = await asyncio.open_unix_connection(world, limit=MAX_LINE_BYTES)
        self.tell("hello", name=self.shape.name, pid=os.getpid())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_open)
            while line := await reader.readline():
                tasks.start_soon(self._obey, json.loads(line))
            os._exit(0)

    def tell(self, notice: str, /, **fields: Any) -> None:
        """Say something to the world."""
        if self._writer is not None:
            self._writer.write(json.dumps({"is": notice, **fields}).encode() + b"\n")

    def report(self, what: str, of: str) -> None:
        """A violation."""
        self.tell("violation", what=what, of=f"{self.shape.name}: {of}")

    async def _obey(self, order: dict[str, Any]) -> None:
        side = self._side
        try:
            if side is None:
                self.tell("down_now", key=order.get("key", -1))
            elif order["do"] == "check":
                side.check()
                self.tell("checked", key=order["key"], held=side.num_held)
            else:
                await side.obey(order)
        except Exception as error:  # a fault of the harness, or of the SDK: both must be seen
            last = "".join(traceback.format_exception(error)[-3:])
            self.report("engine_failed", f"{order.get('do')}: {last}")

    async def _keep_open(self) -> None:
        while True:
            try:
                async with AsyncExitStack() as stack:
                    control = await self._open(stack)
                    self.tell("up")
                    why = str(await control.ended())
            except KVBusError as error:
                why = str(error)
            if self._side is not None:
                self._side.close()
                self._side = None
            self.tell("down", why=why)
            await anyio.sleep(REOPEN_S)

    async def _open(self, stack: AsyncExitStack) -> ChaosPrefill | ChaosDecode:
        kind = ChaosPrefill if self.shape.role == "prefill" else ChaosDecode
        control = await stack.enter_async_context(
            kind(self.attach, self.shape.spec, report=self.report, attach_timeout_s=ATTACH_WITHIN_S)
        )
        await self.memory.open(stack)
        await control.register()
        await control.ready()
        if isinstance(control, ChaosPrefill):
            control.caches = self.memory.caches
            self._side = PrefillSide(self.memory, control, self.tell)
        else:
            control.caches = self.memory.ring_caches
            self._side = DecodeSide(self.memory, control, self.tell, self.report)
            await self._side.open(stack)
        return control
