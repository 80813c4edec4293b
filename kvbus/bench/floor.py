"""Lower bound of a small handoff: four bare processes, with asyncio, pyzmq and msgspec only.

decode engine ─fetch──▶ decode agent ─commit──▶ prefill agent ─released─▶ prefill engine
              ◀fetched─              ◀commits─

    python -m kvbus.bench.floor FOLDER    one of the others, as requested on stdin
"""

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from kvbus.bench.figures import FETCH_STAGES
from kvbus.bus.pump import Pump
from kvbus.bus.sockets import (
    SocketOptions,
    bound_endpoint,
    connect,
    new_context,
    open_dealer,
    open_router,
)
from kvbus.lab.process import EngineChild, engine_process, run_program, serve
from kvbus.spawn import ANY_PORT

TICKET = {"v": 1, "agent_id": "prefill", "endpoint": ANY_PORT, "offer_id": "o" * 32}
TABLES = {"full": {"ids": bytes(4), "first_block": 0}}
FETCH = {"fetch_id": "f" * 32, "ticket": TICKET, "tables": TABLES, "num_tokens": 16}
COMMIT = {"offer_id": "o" * 32, "reader_id": "r" * 65, "secret": "s" * 32, "tables": TABLES}
RELEASED = {"offer_id": "o" * 32, "request_id": "q" * 32, "outcome": "completed"}
FETCHED = {
    "fetch_id": "f" * 32,
    "outcome": "completed",
    "stages_s": dict.fromkeys(FETCH_STAGES, 0.1),
}

encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
OnFrames = Callable[[list[bytes]], None]


def frame(op: str, number: int, body: dict[str, Any]) -> bytes:
    return encode({"v": 1, "op": op, "id": number, "boot": "b" * 32, "body": body})


class Ends:
    def __init__(self, folder: Path) -> None:
        self._context, self._folder = new_context(), folder
        self._pumps = list[Pump]()

    def close(self) -> None:
        for pump in self._pumps:
            pump.close()
        self._context.destroy(linger=0)

    def router(self, name: str, on_frames: OnFrames) -> tuple[Pump, str]:
        endpoint = f"ipc://{self._folder / name}.floor" if name else ANY_PORT
        socket = open_router(self._context, endpoint, SocketOptions())
        return self._pumped(socket, on_frames), bound_endpoint(socket)

    def dealer(self, endpoint: str, on_frames: OnFrames) -> Pump:
        if "://" not in endpoint:
            endpoint = f"ipc://{self._folder / endpoint}.floor"
        socket = open_dealer(self._context, endpoint, SocketOptions())
        connect(socket, endpoint)
        return self._pumped(socket, on_frames)

    def be_prefill_agent(self) -> str:
        engines = list[bytes]()

        def on_commit(frames: list[bytes]) -> None:
            number = decode(frames[-1])["id"]
            peer.send(frames[0], frame("commits", number, {}))
            for engine in engines:
                to_engine.send(engine, frame("released", number, RELEASED))

        to_engine, _ = self.router("prefill-agent", lambda frames: engines.append(frames[0]))
        peer, endpoint = self.router("", on_commit)
        return endpoint

    def be_decode_agent(self, peer_endpoint: str) -> None:
        engine_of = dict[int, bytes]()

        def on_fetch(frames: list[bytes]) -> None:
            number = decode(frames[-1])["id"]
            engine_of[number] = frames[0]
            if not peer.send(frame("commit", number, COMMIT)):  # not connected yet
                asyncio.get_running_loop().call_later(0.01, on_fetch, frames)

        def on_commits(frames: list[bytes]) -> None:
            number = decode(frames[-1])["id"]
            to_engine.send(engine_of.pop(number), frame("fetched", number, FETCHED))

        to_engine, _ = self.router("decode-agent", on_fetch)
        peer = self.dealer(peer_endpoint, on_commits)

    def be_prefill_engine(self) -> None:
        agent = self.dealer("prefill-agent", lambda frames: decode(frames[-1]))
        agent.send(frame("hello", 0, {}))

    def _pumped(self, socket: Any, on_frames: OnFrames) -> Pump:
        pump = Pump(socket, on_frames=on_frames, on_failure=lambda error: sys.exit(str(error)))
        pump.start(asyncio.get_running_loop())
        self._pumps.append(pump)
        return pump


async def be(folder: Path) -> None:
    with closing(Ends(folder)) as ends:
        await serve(ends)


class Floor(Ends):
    def __init__(self, folder: Path, agents: list[EngineChild]) -> None:
        super().__init__(folder)
        self._agents = agents
        self._waiting = dict[int, "asyncio.Future[None]"]()
        self._numbers = itertools.count()
        self._pump = self.dealer("decode-agent", self._answer)

    async def hand_off(self) -> float:
        number, began = next(self._numbers), time.perf_counter()
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._pump.send(frame("fetch", number, FETCH))
        await answered
        return time.perf_counter() - began

    async def rate(self, num_at_once: int, seconds: float) -> tuple[float, float]:
        before, began, first = self._cpu_s(), time.perf_counter(), next(self._numbers)

        async def work() -> None:
            while time.perf_counter() < began + seconds:
                await self.hand_off()

        async with anyio.create_task_group() as tasks:
            for _ in range(num_at_once):
                tasks.start_soon(work)
        number = next(self._numbers) - first - 1
        took_s = time.perf_counter() - began
        return number / took_s, (self._cpu_s() - before) / number

    def _answer(self, frames: list[bytes]) -> None:
        self._waiting.pop(decode(frames[-1])["id"]).set_result(None)

    def _cpu_s(self) -> float:
        return sum(one.child.cpu_s() for one in self._agents)


@asynccontextmanager
async def floor(folder: Path) -> AsyncIterator[Floor]:
    async with AsyncExitStack() as stack:

        async def start(name: str) -> EngineChild:
            log = folder / f"floor-{name}.log"
            process = engine_process(f"bare {name}", "kvbus.bench.floor", str(folder), log=log)
            return await stack.enter_async_context(process)

        prefill, decode_agent = await start("prefill agent"), await start("decode agent")
        engine = await start("prefill engine")
        endpoint = await prefill.request(str, "be_prefill_agent")
        await decode_agent.request(type(None), "be_decode_agent", peer_endpoint=endpoint)
        await engine.request(type(None), "be_prefill_engine")
        bare = stack.enter_context(closing(Floor(folder, [prefill, decode_agent])))
        await bare.hand_off()
        yield bare


if __name__ == "__main__":
    run_program(partial(be, Path(sys.argv[1])))
