"""The engine program of the tests: an engine as a process, and its control by a test.

    test ──{"do": offer, withdraw, fetch, cancel, check}────▶ python -m tests.support.engine_program
    test ◀──{"is": up, down, offered, over, fetched, freed, ...}── in lines of JSON

It is an engine of `kvbus.lab`, with the bytes of `tests.support.pattern`. It fills offers,
overwrites released blocks in the callback, compares each byte of a completed fetch, and checks free
blocks. It reports a ``violation`` of an invariant. It ends with its test, or when it cannot know
whether its blocks are free.
"""

import asyncio
import faulthandler
import signal
import sys
import traceback
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import msgspec
import torch

from kvbus.engine import Connection, Fetch, Offer, Outcome
from kvbus.engine.bounce import HostFetch
from kvbus.errors import ClosedError, ErrorCode, FetchFailed, KVBusError, RequestRefused
from kvbus.geometry import EngineSpec, KvLayout, num_blocks_for
from kvbus.lab.lab_engine import Offered
from tests.support.engines import StrictEngine, blocks_between
from tests.support.expected import positions
from tests.support.forked import ForkedEngine, end_at_once
from tests.support.memories import Memory
from tests.support.pattern import Blocks, Pool, expected, fill, num_wrong_bytes, views_of

MAX_LINE_BYTES = 1 << 24
ROOM_WITHIN_S = 2.0
MAX_PARKED = 256
ATTACHED_WITHIN_S = 600.0
STEP_S = 0.02

GONE = {"outcome": "gone", "code": "", "stage": "", "fetch_id": ""}
MOMENTS = {
    "offered": ("made",),
    "over": ("ended", "freed"),
    "checked": ("ended", "freed"),
    "fetched": ("ended",),
    "freed": ("freed",),
    "refused": ("made", "ended", "freed"),
    "down_now": ("made", "ended", "freed"),
}
"""The moments of an order that each notice settles."""

Order = dict[str, Any]
Told = dict[str, Any]


def fetch_order(offer: int, holder: EngineSpec, ticket: Any, num_tokens: int, **more: Any) -> Order:
    """To fetch an offer of this key, which the engine ``holder`` has made."""
    return {
        "do": "fetch",
        "offer": offer,
        "holder": msgspec.to_builtins(holder),
        "ticket": ticket,
        "num_tokens": num_tokens,
        "first_token": 0,
        "fetch_id": uuid.uuid4().hex,
        **more,
    }


@dataclass(frozen=True)
class EngineConfig:
    """Arguments of the program.

    ``memory`` is ``direct``, ``staged`` (not registered with NIXL) or ``ring`` (with
    ``ring_blocks``). No ``ranks`` means all; the role ``rank`` has only their memory.
    """

    role: str
    attach: str
    spec: EngineSpec
    num_blocks: dict[str, int]
    layout: str = "NHD"
    memory: str = "direct"
    ring_blocks: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    ranks: tuple[int, ...] = ()


def main() -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    programs = {"prefill": PrefillProgram, "decode": DecodeProgram, "rank": Program}
    anyio.run(programs[config.role](config).run)


class Program:
    """One engine: its memory, its link, and its orders."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.spec = config, config.spec
        memory = Memory(KvLayout.parse(config.layout), direct=config.memory == "direct")
        self.engine = StrictEngine(
            config.attach,
            config.spec,
            memory,
            num_blocks=config.num_blocks,
            ring_blocks=config.ring_blocks or None,
            ranks=config.ranks or None,
            control=config.role != "rank",
            attach_timeout_s=ATTACHED_WITHIN_S,
            wait_s=ROOM_WITHIN_S,
        )
        self.link = self.engine.link
        if config.role == "decode" and not config.ring_blocks:
            self.link.caches = ()  # the pool looks after free blocks
        self.views = views_of(self.spec, self.engine.caches)
        self.pool = Pool(self.views, config.num_blocks, self.report, config.seed)
        self._is_open = False

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_open)
            async for line in _lines():
                tasks.start_soon(self._obey, msgspec.json.decode(line))
            end_at_once()

    def tell(self, notice: str, /, **fields: Any) -> None:
        sys.stdout.buffer.write(msgspec.json.encode({"is": notice, **fields}) + b"\n")
        sys.stdout.buffer.flush()

    def report(self, what: str, of: str, **more: Any) -> None:
        self.tell("violation", what=what, of=f"{self.spec.engine_id}: {of}", **more)

    @property
    def num_held(self) -> int:
        ring = self.engine.ring
        return self.pool.num_held + (ring.num_held if ring is not None else 0)

    def look(self) -> None:
        self.pool.check()

    async def _keep_open(self) -> None:
        self.link.when_changed(self._change)
        try:
            async with self.engine:
                self._is_open = True
                self._change()
                await anyio.sleep_forever()
        except RequestRefused as error:
            if error.code != ErrorCode.DRAINING:
                raise
            self.tell("in_doubt", why=f"{self.spec.engine_id}: {error}")
            end_at_once()

    def _change(self) -> None:
        is_up, problem = self.link.is_open, self.link.problem
        if self._is_open:
            code = getattr(problem, "code", "")
            self.tell("up" if is_up else "down", why=str(problem), code=code)

    async def _obey(self, order: Order) -> None:
        try:
            if not self._is_open:
                self.tell("down_now", key=order.get("key", -1))
            else:
                await getattr(self, f"do_{order['do']}")(order)
        except Exception as error:  # a fault of this program, or of the SDK: both must be seen
            last = "".join(traceback.format_exception(error)[-3:])
            self.report("engine_failed", f"{order.get('do')}: {last}")

    async def do_check(self, order: Order) -> None:
        self.look()
        self.tell("checked", key=order["key"], held=self.num_held)


class PrefillProgram(Program):
    """Computes offers, and uses their blocks for others as soon as they are its own again."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._offers: dict[int, Offered] = {}
        self._parked: dict[int, Offered] = {}
        """The last ones; their blocks are others' by now."""
        self._num_unknown = 0
        """Blocks of offers that the agent may have made."""

    @property
    def num_held(self) -> int:
        return super().num_held - self._num_unknown

    async def do_offer(self, order: Order) -> None:
        key, num_tokens = order["key"], order["steps"][-1]
        sizes = {group.name: group.block_size for group in self.spec.groups}
        wanted = {name: num_blocks_for(num_tokens, size) for name, size in sizes.items()}
        blocks = self.pool.take(wanted, f"offer {key}")
        if blocks is None:
            self.tell("refused", key=key, code="full")
            return
        try:
            await self._offer(order, blocks)
        finally:
            self._offers.pop(key, None)
            self.pool.give(blocks)

    async def do_withdraw(self, order: Order) -> None:
        """An offer that has ended is withdrawn well, and a parked one ends."""
        key = order["offer"]
        if offer := self._offers.get(key) or self._parked.pop(key, None):
            await offer.withdraw()

    async def _offer(self, order: Order, blocks: Blocks) -> None:
        key, steps, connection = order["key"], order["steps"], self.link.connection
        is_whole, more = len(steps) == 1 and self.engine.ring is None, {}
        if self.engine.ring is None:
            more["transfer_id"] = order.get("transfer_id")
        fill(key, self.views, blocks, 0, steps[0])
        try:
            offer = self._offers[key] = await self.engine.offer(
                f"{key}",
                num_tokens=steps[0],
                block_ids=blocks_between(self.spec, blocks, 0, steps[0]),
                total=None if is_whole else steps[-1],
                ttl_s=order.get("ttl_s"),
                **more,
            )
        except KVBusError as error:
            self.tell("refused", key=key, code=error.code)
            if not isinstance(error, RequestRefused) and self.engine.ring is None:
                await self._keep_until_the_end(connection, blocks)
            return
        self.tell("offered", key=key, offer_id=offer.offer_id, ticket=offer.ticket)
        with suppress(KVBusError):  # it has ended, or will by its time to live
            if not is_whole:
                await self._grow(offer, order, blocks)
            if order.get("parks") and isinstance(offer.offer, Offer):
                await offer.offer.park()
        await self._follow(key, offer)

    async def _keep_until_the_end(self, connection: Connection, blocks: Blocks) -> None:
        """The offer may have been made: its blocks are free once the agent has ended."""
        number = sum(map(len, blocks.values()))
        self._num_unknown += number
        try:
            await connection.ended()
        finally:
            self._num_unknown -= number

    async def _grow(self, offer: Offered, order: Order, blocks: Blocks) -> None:
        for before, now in pairwise(order["steps"]):
            await anyio.sleep(STEP_S)
            fill(order["key"], self.views, blocks, before, now)
            await offer.extend(now, blocks_between(self.spec, blocks, before, now))
        await offer.seal()

    async def _follow(self, key: int, offer: Offered) -> None:
        """An offer ends with its agent; its link closes none that something waits for."""
        try:
            outcome = str(await offer.ended)
            if outcome == Outcome.PARKED:
                self._note_parked(key, offer)
        except KVBusError as error:
            outcome = "lost"
            if isinstance(error, ClosedError):
                self.report("closed_early", f"offer {key}: {error}")
        self.tell("over", key=key, outcome=outcome)

    def _note_parked(self, key: int, offer: Offered) -> None:
        self._parked[key] = offer
        if len(self._parked) > MAX_PARKED:
            del self._parked[next(iter(self._parked))]


class DecodeProgram(Program):
    """Fetches, compares twice before it releases blocks, and checks free ones."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._fetches: dict[int, Fetch | HostFetch] = {}
        self._queued: dict[int, anyio.Event] = {}
        """Requests that wait for their fetch; the event ends one."""

    def look(self) -> None:
        super().look()
        self._check_ring()

    def _check_ring(self) -> None:
        try:
            self.link.check_free_blocks()
        except AssertionError as error:
            self.report("late_write", f"in the ring: {error}")
            self.link.free_blocks.clear()

    async def do_cancel(self, order: Order) -> None:
        if queued := self._queued.get(order["fetch"]):
            queued.set()
        fetch = self._fetches.get(order["fetch"])
        with suppress(KVBusError):
            if fetch is not None:
                await fetch.cancel(release_offer=order["release_offer"])

    async def do_fetch(self, order: Order) -> None:
        if order.get("queue_s") and not await self._queue(order):
            self._tell_end(order["key"], "refused", code="cancelled")
            return
        key, wanted = order["key"], {}
        for group in self.spec.groups:
            at = positions(group, order["first_token"], order["num_tokens"])
            first, stop = at.start // group.block_size, num_blocks_for(at.stop, group.block_size)
            wanted[group.name] = stop - first if at else 0
        blocks = self.pool.take(wanted, f"fetch {key}")
        if blocks is None:
            if order.get("queue_s"):
                self.link.release(order["ticket"])
            self._tell_end(key, "refused", code="full")
        elif await self._fetch(order, blocks):
            self.pool.give(blocks)
        else:  # new memory, as `Fetch.blocks_freed` says; here with all that the engine has
            end_at_once()

    async def _queue(self, order: Order) -> bool:
        """Hold the offer for a while; return whether to fetch it then."""
        is_over = self._queued[order["key"]] = anyio.Event()
        self.link.hold(order["ticket"])
        with anyio.move_on_after(order["queue_s"]):
            await is_over.wait()
        del self._queued[order["key"]]
        if is_over.is_set():
            self.link.release(order["ticket"])
        return not is_over.is_set()

    async def _fetch(self, order: Order, blocks: Blocks) -> bool:
        """Whether the blocks are known to be free."""
        key = order["key"]
        if self.engine.ring is not None:
            self._check_ring()  # `Pool.take` has checked the blocks of the engine itself
        try:
            fetch = self._fetches[key] = self._start(order, blocks)
        except KVBusError as error:
            self._tell_end(key, "failed", stage="lost", code=error.code, message=error.message)
            self.tell("freed", key=key, is_free=True)
            return True
        is_free = True
        try:
            fetched = await fetch.ended
            self._compare(order, fetch, blocks, "")
            more = {"path": fetched.path, "num_bytes": fetched.num_bytes}
            self._tell_end(key, "completed", fetch_id=fetch.fetch_id, **more)
            if keep_s := order.get("keep_s"):
                await anyio.sleep(keep_s)
                self._compare(order, fetch, blocks, " later")
        except FetchFailed as error:
            if order.get("queue_s"):  # a ring may be full, and fetch nothing
                self.link.release(order["ticket"])
            told = {"stage": error.stage, "code": error.code, "message": error.message}
            self._tell_end(key, "failed", fetch_id=fetch.fetch_id, **told)
            if (error.stage, error.code) == ("lost", ErrorCode.CLOSED):
                self.report("closed_early", f"fetch {key}: {error}")
            is_free = await self._freed(fetch, error)
        finally:
            del self._fetches[key]
        self.tell("freed", key=key, is_free=is_free)
        return is_free

    def _start(self, order: Order, blocks: Blocks) -> Fetch | HostFetch:
        more: dict[str, Any] = {"timeout_s": order.get("timeout_s")}
        more |= {name: order[name] for name in ("num_tokens", "first_token", "fetch_id")}
        if self.engine.ring is None:
            more["chunk_tokens"] = order.get("chunk_tokens", 0)
        zero_tail = order.get("zero_tail", False)
        ticket = order["ticket"]
        return self.engine.fetch(ticket, block_ids=blocks, zero_tail=zero_tail, **more).fetch

    async def _freed(self, fetch: Any, ended: FetchFailed) -> bool:
        try:
            await fetch.freed
        except KVBusError as error:
            self.tell("in_doubt", why=f"{self.spec.engine_id}: {error!r}")
            return False
        inner = ended.__cause__
        if isinstance(inner, FetchFailed) and inner.stage == "lost" and not inner.blocks_free:
            # The agent closed the connection and lives: the host blocks may still change.
            self.tell("in_doubt", why=f"{self.spec.engine_id}, ring: {ended.message}")
            return False
        return True

    def _tell_end(self, key: int, outcome: str, **more: Any) -> None:
        self.tell("fetched", **{**GONE, "key": key, "outcome": outcome, **more})

    def _compare(self, order: Order, fetch: Any, blocks: Blocks, when: str) -> None:
        num_wrong = 0
        holder = msgspec.convert(order["holder"], EngineSpec) if self.engine.ring is None else None
        for view in self.views:
            name = view.group.name
            want = expected(
                order["offer"],
                view,
                blocks[name],
                holder=holder.group(name) if holder is not None else None,
                first=order["first_token"],
                stop=order["num_tokens"],
                zero_tail=order.get("zero_tail", False),
            )
            ids = torch.as_tensor(blocks[name], dtype=torch.int64)
            num_wrong += num_wrong_bytes(view.bits[ids], want)
        if num_wrong:
            of = f"{num_wrong} bytes{when} of fetch {fetch.fetch_id} of offer {order['offer']}"
            self.report("wrong_bytes", of, fetch_id=fetch.fetch_id)


async def _lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await reader.readline():
        yield line


class Asked:
    """One order: how its offer began, how it ended, and when its blocks were free."""

    def __init__(self) -> None:
        self.made, self.ended, self.freed = (asyncio.Future[Told]() for _ in range(3))

    def settle(self, told: Told, *moments: str) -> None:
        """Keep the first result of each moment."""
        for moment in moments:
            future: asyncio.Future[Told] = getattr(self, moment)
            if not future.done():
                future.set_result(told)


class EngineProcess:
    """The program, from its test; it can be started again. ``up`` while it has a session."""

    def __init__(self, config: EngineConfig, log: Path) -> None:
        self.config, self._log = config, log
        self.up = asyncio.Event()
        self.lost: list[str] = []
        """The codes, each time that it lost its session, or a fetch with it."""
        self.asked: dict[int, Asked] = {}
        self._process: ForkedEngine | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._listening: asyncio.Task[None] | None = None
        self._num_starts = 0

    async def start(self) -> None:
        """Start its process, with another seed than the one before it had."""
        config = replace(self.config, seed=self.config.seed + self._num_starts)
        self._num_starts += 1
        told = msgspec.json.encode(config).decode()
        command = [sys.executable, "-m", "tests.support.engine_program", told]
        with self._log.open("ab") as log:
            self._process = ForkedEngine(command, stdin=PIPE, stdout=PIPE, stderr=log)
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        await loop.connect_read_pipe(lambda: protocol, self._process.stdout)
        self._writer, _ = await loop.connect_write_pipe(asyncio.Protocol, self._process.stdin)
        self._listening = asyncio.create_task(self._listen(reader))

    async def kill(self) -> None:
        if self._process is not None and self._listening is not None:
            self._process.kill()
            await self._listening

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def ask(self, key: int, order: Order) -> Asked:
        """Give an order; an engine that is not there does nothing."""
        asked = Asked()
        if self._writer is None or self._writer.is_closing():
            asked.settle(GONE, "made", "ended", "freed")
        else:
            self.asked[key] = asked
            self.tell({**order, "key": key})
        return asked

    def tell(self, order: Order) -> None:
        if self._writer is not None:
            self._writer.write(msgspec.json.encode(order) + b"\n")

    def on_told(self, told: Told) -> None:
        """Handle a notice without an order: a violation, or doubt."""
        if told["is"] == "violation":
            raise AssertionError(told)

    def on_end(self) -> None:
        """Handle the end of the process."""

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            if line.endswith(b"\n"):
                self._note_boot(msgspec.json.decode(line))
        assert self._process is not None
        await asyncio.to_thread(self._process.wait)
        if self._writer is not None:
            self._writer.close()
        self.up.clear()
        for asked in self.asked.values():
            asked.settle(GONE, "made", "ended", "freed")
        self.asked.clear()
        self.on_end()

    def _note_boot(self, told: Told) -> None:
        notice, asked = told["is"], self.asked.get(told.get("key", -1))
        if notice == "up":
            self.up.set()
        elif notice == "down":
            self.up.clear()
            self.lost.append(told["code"])
        elif asked is None:
            self.on_told(told)
        else:
            if told.get("stage") == "lost":
                self.lost.append(told["code"])
            if notice == "fetched" and asked.ended.done():
                self.on_told({"is": "violation", "what": "ended_twice", "of": f"{told}"})
            is_refused = told.get("outcome") == "refused"
            asked.settle({**GONE, **told}, *MOMENTS["refused" if is_refused else notice])
            if asked.freed.done() and asked.ended.done():
                del self.asked[told["key"]]


if __name__ == "__main__":
    main()
