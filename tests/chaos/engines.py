"""The engines of a chaos run, as the world sees them: told, killed and stopped."""

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.chaos import engine_process
from tests.chaos.shapes import Shape
from tests.chaos.stops import Stops

Told = dict[str, Any]
GONE = {"outcome": "gone", "code": "", "stage": "", "fetch_id": ""}


@dataclass
class Asked:
    """One offer or fetch: how it began (offers), how it ended, and when its blocks were free."""

    made: "asyncio.Future[Told]" = field(default_factory=asyncio.Future)
    ended: "asyncio.Future[Told]" = field(default_factory=asyncio.Future)
    freed: "asyncio.Future[Told]" = field(default_factory=asyncio.Future)

    def settle(self, name: str, told: Told) -> bool:
        """False when it had been settled before."""
        future: asyncio.Future[Told] = getattr(self, name)
        if future.done():
            return False
        future.set_result(told)
        return True

    def give_up(self) -> None:
        for name in ("made", "ended", "freed"):
            self.settle(name, GONE)


class Engine:
    """One engine; it is started again each time that it was killed."""

    context = multiprocessing.get_context("forkserver")
    _incarnations = count()

    def __init__(self, shape: Shape, attach: Path, socket: Path, seed: int) -> None:
        self.shape, self._attach, self._socket, self._seed = shape, attach, socket, seed
        self.stops = Stops()
        self.up = asyncio.Event()
        self.asked: dict[int, Asked] = {}
        self.on_violation: Callable[[Told], None] = print
        self.on_doubt: Callable[[str], None] = print
        self._writer: asyncio.StreamWriter | None = None
        self._process: Any = None
        self._killed: set[int] = set()
        self._in_doubt: set[int] = set()

    def start(self) -> None:
        """Start its process."""
        seed = self._seed + next(self._incarnations)
        arguments = (self.shape.name, str(self._attach), str(self._socket), seed)
        self._process = self.context.Process(target=engine_process.main, args=arguments)
        self._process.start()

    async def kill(self) -> None:
        """End it at once; what it was asked is gone."""
        self.stops.end()
        if self._process is not None:
            self._killed.add(self._process.pid)
            self._process.kill()
            await asyncio.to_thread(self._process.join)
            self._process.close()
            self._process = None

    def stop(self) -> None:
        """Stop its process."""
        self.stops.begin()
        with suppress(ProcessLookupError):  # it has ended, in doubt
            os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        if self.stops.is_stopped:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)
            self.stops.end()

    def ask(self, key: int, order: Told) -> Asked:
        """Give an order; an engine that is not there does nothing."""
        asked = self.asked[key] = Asked()
        if self._writer is None or self._writer.is_closing():
            asked.give_up()
            del self.asked[key]
        else:
            self.tell({**order, "key": key})
        return asked

    def tell(self, order: Told) -> None:
        """Say what needs no answer."""
        if self._writer is not None:
            self._writer.write(json.dumps(order).encode() + b"\n")

    async def listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int
    ) -> None:
        """Until the process has ended, as nobody but `kill` may make it."""
        self._writer = writer
        with suppress(OSError):
            while line := await reader.readline():
                if line.endswith(b"\n"):
                    self._hear(json.loads(line), pid)
        writer.close()
        if self._writer is writer:
            if pid not in self._killed | self._in_doubt:
                ended = f"{self.shape.name} has ended"
                self.on_violation({"what": "engine_failed", "of": ended})
            self.up.clear()
            self._writer = None
            for asked in self.asked.values():
                asked.give_up()
            self.asked.clear()
            if pid in self._in_doubt - self._killed:
                self._in_doubt.clear()
                self.start()

    def _hear(self, told: Told, pid: int) -> None:
        what, asked = told["is"], self.asked.get(told.get("key", -1))
        if what == "up":
            self.up.set()
        elif what == "down":
            self.up.clear()
        elif what == "in_doubt":
            self._in_doubt.add(pid)
            self.on_doubt(told["why"])
        elif what == "violation":
            self.on_violation(told)
        elif asked is not None:
            self._note(asked, what, told)

    def _note(self, asked: Asked, what: str, told: Told) -> None:
        """An end that comes twice is a violation."""
        if what == "offered":
            asked.settle("made", told)
        elif what in ("over", "fetched", "checked"):
            if not asked.settle("ended", told):
                self.on_violation({"what": "ended_twice", "of": f"{self.shape.name}: {told}"})
            if what != "fetched" or told["outcome"] == "refused":
                asked.settle("freed", told)
        elif what == "freed":
            asked.settle("freed", told)
        elif what in ("refused", "down_now"):
            asked.settle("made", {**GONE, **told})
            asked.settle("ended", {**GONE, **told})
            asked.settle("freed", told)
        if asked.freed.done() and asked.ended.done():
            self.asked.pop(told["key"], None)
