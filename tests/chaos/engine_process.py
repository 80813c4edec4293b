"""An engine of a chaos run, in a process of its own: it does what the world says, and tells all.

    world ──lines of JSON: offer, withdraw, fetch, cancel, check──▶ engine
    world ◀──up, down, offered, over, fetched, freed, in_doubt, violation── engine

Its sessions are kept, as those of users are. It ends when the world does, or when nobody says any
more whether its blocks are free: then it starts anew.
"""

import asyncio
import ctypes
import faulthandler
import json
import logging
import os
import signal
import traceback
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import torch

from kvbus.engine import KeptSession
from tests.chaos.decode_side import DecodeSide
from tests.chaos.engine_memory import EngineMemory
from tests.chaos.prefill_side import PrefillSide
from tests.chaos.shapes import BY_NAME, Shape
from tests.chaos.strictness import ChaosDecode, ChaosPrefill, FreeRing

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
    """One engine: its memory, its sessions, and its orders."""

    def __init__(self, shape: Shape, attach: Path, seed: int) -> None:
        self.shape, self.attach = shape, attach
        self.memory = EngineMemory(shape, attach, self.report, seed)
        self._free_ring = FreeRing()
        self._side: PrefillSide | DecodeSide | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, world: str) -> None:
        """Until the world hangs up; what is open then is left to the kernel."""
        reader, self._writer = await asyncio.open_unix_connection(world, limit=MAX_LINE_BYTES)
        self.tell("hello", name=self.shape.name, pid=os.getpid())
        logging.getLogger("kvbus.engine").addHandler(_Faults(self))
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
        async with AsyncExitStack() as stack:
            await self.memory.open(stack)
            if self.shape.role == "prefill":
                offering = KeptSession(self._new_prefill, begin=_register, on_change=self._change)
                await (await stack.enter_async_context(offering)).opened()
                self._side = PrefillSide(self.memory, offering, self.tell)
            else:
                fetching = KeptSession(self._new_decode, begin=_register, on_change=self._change)
                await (await stack.enter_async_context(fetching)).opened()
                self._side = DecodeSide(self.memory, fetching, self.tell)
                await self._side.open(stack)
            self._change()
            await anyio.sleep_forever()

    def _change(self) -> None:
        """There is a session, or there is none."""
        if self._side is not None:
            control = self._side.control
            self.tell("up" if control.session is not None else "down", why=str(control.problem))

    def _new_prefill(self) -> ChaosPrefill:
        session = ChaosPrefill(self.attach, self.shape.spec, report=self.report)
        session.caches = self.memory.shared
        return session

    def _new_decode(self) -> ChaosDecode:
        session = ChaosDecode(self.attach, self.shape.spec, self._free_ring, report=self.report)
        session.caches = self.memory.shared if self.memory.ring is not None else ()
        return session


async def _register(session: ChaosPrefill | ChaosDecode) -> None:
    await session.register()
    await session.ready()


class _Faults(logging.Handler):
    """What a kept session logs with a trace is a fault of the SDK, which goes on."""

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            last = "".join(traceback.format_exception(record.exc_info[1])[-3:])
            self._engine.report("engine_failed", f"{record.getMessage()}: {last}")
