"""Engines as simulated processes, with real memory: they offer by the SDK, and fetch by messages.

Engines poison blocks as soon as they are released, and check them when they use them again. So they
find each byte that is read, or lands, too late.
"""

import asyncio
import math
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import anyio
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvbus import geometry
from kvbus import protocol as wire
from kvbus.bus import RequestClient, new_boot_id
from kvbus.engine import Connection, Offer, Runner
from kvbus.engine.messages import offer_message
from kvbus.engine.offers import OfferRequest, Offers
from kvbus.errors import ClosedError, KVBusError, PeerLost
from kvbus.memory.segment import SharedSegment
from tests.sim.agent import SimAgent, SimAttach
from tests.sim.handoffs import HEAD_DIM, NUM_HEADS, NUM_LAYERS, PARTS, Content, Handoff, Ledger
from tests.sim.network import Network, Process, SimContext
from tests.sim.world import World

REQUEST_S = 1e4
"""A live agent replies, however long it was frozen."""
CHECK_S = 0.05
POISON = 0xA5
GROUP = "full"
Segments: TypeAlias = Iterator[tuple[wire.PassSegment, SharedSegment]]
_ORDER = (geometry.AxisName.BLOCK, geometry.AxisName.TOKEN, geometry.AxisName.DIM)


@dataclass(frozen=True)
class Shape:
    """How an engine keeps its KV."""

    tp: int = 1
    block_size: int = 4
    layout: str = "block,layer,kv,token,head,dim"
    num_blocks: int = 512

    def spec(self, engine_id: str) -> geometry.EngineSpec:
        layers = tuple(range(NUM_LAYERS))
        shape = self.block_size, NUM_HEADS, HEAD_DIM, "uint8", PARTS
        group = geometry.GroupSpec(GROUP, layers, *shape)
        return geometry.EngineSpec(engine_id, "model", self.tp, (group,))


class Cache:
    """The memory of all ranks, and its free blocks."""

    def __init__(self, spec: geometry.EngineSpec, shape: Shape, world: World) -> None:
        layout = geometry.KvLayout.parse(shape.layout)
        self._block_size, self._world = shape.block_size, world
        self.ranks = [
            geometry.lay_out_rank(spec, rank, layout, num_blocks=shape.num_blocks)
            for rank in range(spec.num_ranks)
        ]
        self.segments = [SharedSegment(rank.segments[0].size_bytes) for rank in self.ranks]
        self._views = [
            (region, _view(region, segment.view()))
            for rank, segment in zip(self.ranks, self.segments, strict=True)
            for region in rank.regions
        ]
        self.free = list(range(shape.num_blocks))
        self.num_blocks = shape.num_blocks
        self._fill(self.free)

    def take(self, first_token: int, num_tokens: int) -> list[int] | None:
        """Random blocks for these tokens; None when there are not enough."""
        size = self._block_size
        wanted = -(-num_tokens // size) - first_token // size if num_tokens > first_token else 0
        if wanted > len(self.free):
            return None
        taken = []
        for _ in range(wanted):
            at = self._world.luck.randrange(len(self.free))
            self.free[at], self.free[-1] = self.free[-1], self.free[at]
            taken.append(self.free.pop())
        for _, view in self._views:
            if not (view[:, :, :, np.array(taken, np.int64)] == POISON).all():
                self._world.fail(f"blocks that were free have changed: {taken}")
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        self._fill(blocks)
        self.free.extend(blocks)

    def write(self, blocks: Sequence[int], start: int, content: Content, stop: int) -> None:
        """Write tokens [start, stop) of a request whose blocks begin with its first token's."""
        at, slots = self._places(blocks, 0, start, stop)
        for region, view in self._views:
            view[:, :, :, at, slots] = _part_of(region, content)[:, :, :, start:stop]

    def has(self, blocks: Sequence[int], start: int, content: Content, stop: int) -> bool:
        """Whether ``blocks``, from that of ``start`` on, hold tokens [start, stop)."""
        at, slots = self._places(blocks, start // self._block_size, start, stop)
        return all(
            np.array_equal(view[:, :, :, at, slots], _part_of(region, content)[:, :, :, start:stop])
            for region, view in self._views
        )

    def _places(
        self, blocks: Sequence[int], first_block: int, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        numbers, tokens = np.divmod(np.arange(start, stop), self._block_size)
        return np.array(blocks, np.int64)[numbers - first_block], tokens

    def _fill(self, blocks: Sequence[int]) -> None:
        for _, view in self._views:
            view[:, :, :, np.array(blocks, np.int64)] = POISON


def _view(region: geometry.Region, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Axes: layer, part, head, block, token, dim."""
    names = (geometry.AxisName.LAYER, geometry.AxisName.KV, geometry.AxisName.HEAD, *_ORDER)
    return np.lib.stride_tricks.as_strided(
        memory[region.offset_bytes :],
        [region.size(name) for name in names],
        [region.stride_bytes(name) for name in names],
    )


def _part_of(region: geometry.Region, content: Content) -> Content:
    heads = slice(region.first_head, region.first_head + region.num_heads)
    parts = [PARTS.index(part) for part in region.parts]
    return content[np.ix_(region.layers, parts)][:, :, heads]


class SimEngine:
    """One process of an engine: a control session, and one for the memory of each rank."""

    def __init__(
        self,
        network: Network,
        ledger: Ledger,
        find_agent: Callable[[], SimAgent | None],
        *,
        name: str,
        machine: str,
        shape: Shape,
    ) -> None:
        world = network.world
        self.world, self.network, self.ledger, self.name = world, network, ledger, name
        self.process = Process(name, machine, world.new_loop(name))
        self.spec = shape.spec(name)
        self.cache = Cache(self.spec, shape, world)
        self.is_ready = False
        self.agent: SimAgent | None = None
        self._instances = [uuid.uuid4().hex for _ in self.cache.ranks]
        self._find_agent = find_agent
        self._client: RequestClient | None = None
        self._attached: list[SimAttach] = []
        self._lost = anyio.Event()
        self.main = self.process.loop.create_task(self._run())
        world.watch(self.main, self.process.loop)

    def crash(self) -> None:
        """As SIGKILL."""
        self._client, self.is_ready = None, False
        self._detach()
        self.lose_all()

    def leave(self) -> None:
        """Hang up, and then use the blocks, unless the process is frozen."""
        if not self.process.loop.is_frozen:
            self._detach()
            self._hang_up()

    def on_hung_up(self, _: SimAttach) -> None:
        self._hang_up()

    def _detach(self) -> None:
        for attach in self._attached:
            attach.end()
        self._attached = []

    def on_ready(self) -> None:
        """An agent is there, again or for the first time."""

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        if self.process.is_alive:
            self.process.loop.call_soon(call, *args)

    def lose_all(self) -> None:
        """All that the agent, or this process, did has ended without a report."""

    def see(self, notice: wire.Notice) -> None:
        """Handle a notice of the agent."""

    async def _run(self) -> None:
        while True:
            agent = self._find_agent()
            if agent is None or not agent.is_up:
                await anyio.sleep(CHECK_S)
                continue
            self._lost = anyio.Event()
            async with anyio.create_task_group() as tasks:
                try:
                    await self._open(agent, tasks)
                except (KVBusError, _HungUpError):
                    await anyio.sleep(CHECK_S)
                else:
                    self.agent, self.is_ready = agent, True
                    self.on_ready()
                    await self._lost.wait()
                self._client, self.is_ready = None, False
                self.lose_all()
                tasks.cancel_scope.cancel()
            self._detach()

    async def _open(self, agent: SimAgent, tasks: Any) -> None:
        for rank in self.cache.ranks:
            memory = await self._session(agent, tasks, self.segments_of(rank))
            instance = self._instances[rank.rank]
            await self._ask(memory, wire.Register(engine=self.spec, rank=rank, instance=instance))
        self._client = control = await self._session(agent, tasks, iter(()))
        await self._register(control)

    async def _register(self, control: RequestClient) -> None:
        await self._ask(control, wire.Register(engine=self.spec))
        await self._ask(control, wire.AwaitReady())

    def segments_of(self, rank: geometry.RankSpec) -> Segments:
        memory, segment = self.cache.segments[rank.rank], rank.segments[0]
        yield wire.PassSegment(segment.segment_id, segment.size_bytes), memory

    async def _session(self, agent: SimAgent, tasks: Any, segments: Segments) -> RequestClient:
        boot = new_boot_id()
        attach = SimAttach(agent, self.on_hung_up)
        self._attached.append(attach)
        versions = wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION
        await self._pass(attach, wire.Hello(*versions, self.name, boot), [])
        for message, memory in segments:
            await self._pass(attach, message, [os.dup(memory.fd)])
        client = RequestClient(
            SimContext(self.network, self.process),  # type: ignore[arg-type]  # stands for it
            agent.runtime.agent.identity.engine_endpoint,
            boot=boot,
            on_notice=self._take,
            max_pending=1 << 20,
        )
        tasks.start_soon(client.run)
        return client

    async def _pass(self, attach: SimAttach, message: Any, fds: list[int]) -> None:
        await self._answer(lambda on_reply: attach.pass_on(message, fds, on_reply))

    async def _ask(self, client: RequestClient, message: Any) -> Any:
        return await self._answer(
            lambda reply: client.send(message, timeout_s=REQUEST_S, on_reply=reply)
        )

    async def _answer(self, ask: Callable[[Callable[[Any], None]], object]) -> Any:
        answered: asyncio.Future[Any] = self.process.loop.create_future()
        lost = asyncio.ensure_future(self._lost.wait())

        def on_reply(reply: Any) -> None:
            self.process.loop.call_soon(_settle, answered, reply)

        ask(on_reply)
        await asyncio.wait([answered, lost], return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not answered.done():
            answered.cancel()
            raise _HungUpError
        return answered.result()

    def _hang_up(self) -> None:
        self._on_loop(lambda: self._lost.set())  # noqa: PLW0108  # it may be another one by then

    def agent_died(self, agent: SimAgent) -> None:
        if any(attach.agent is agent for attach in self._attached):
            self._hang_up()

    def _take(self, notice: wire.Notice) -> None:
        if self._client is not None:
            self.see(notice)


def _settle(answered: "asyncio.Future[Any]", reply: Any) -> None:
    if not answered.done() and isinstance(reply, KVBusError):
        answered.set_exception(reply)
    elif not answered.done():
        answered.set_result(reply)


class _HungUpError(Exception):
    """The agent of a connection has ended."""


class SimConnection(Connection):
    """The connection of a link that has no attach socket of its own."""

    def __init__(self, client: RequestClient, engine_id: str) -> None:
        super().__init__("/nowhere", engine_id)
        self._requests = client

    def send(self, message: Any, on_reply: Callable[[Any], None], *, timeout_s: float = 0) -> None:
        if self.lost is not None:
            raise self.lost
        self._requests.send(message, timeout_s=timeout_s or REQUEST_S, on_reply=on_reply)

    def lose(self, error: KVBusError) -> None:
        if self.lost is None:
            self.lost = self._requests.closed_by = error
            self._requests.close()
            self.events.on_lost(error)


class PrefillEngine(SimEngine):
    """Offers what handoffs want, in one piece or several, as a `Link` does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._page = SharedSegment(wire.CELLS_BYTES)
        self._runner = Runner()
        self._connection: SimConnection | None = None
        self._is_leaving = False
        self._new_link()
        super().__init__(*args, **options)
        self._runner.begin(self.process.loop)

    def _new_link(self) -> None:
        self._offers, self._instance = Offers(self._page), uuid.uuid4().hex
        self._states: dict[Offer, OfferRequest] = {}

    def segments_of(self, rank: geometry.RankSpec) -> Segments:
        yield from super().segments_of(rank)
        if rank.rank == 0:
            yield wire.PassSegment("cells", wire.CELLS_BYTES, kind="cells"), self._page

    async def _register(self, control: RequestClient) -> None:
        offers, republishes = self._offers, self._offers.republishes
        register = wire.Register(engine=self.spec, instance=self._instance, republishes=republishes)
        await self._ask(control, register)
        ready = await self._ask(control, wire.AwaitReady())
        self._connection = SimConnection(control, self.name)
        offers.check_memory(ready.memory)
        offers.opened(self._connection)
        if republishes:
            await self._ask(control, wire.Republished(offers.ended_lately()))

    def leave(self) -> None:
        self._is_leaving = not self.process.loop.is_frozen
        super().leave()

    def crash(self) -> None:
        self._connection = None
        super().crash()

    def lose_all(self) -> None:
        if not self.process.is_alive:
            for handoff in self.ledger.offered_by(self):
                self.ledger.release(handoff, None)
            return
        connection, self._connection = self._connection, None
        error = ClosedError("the link is closed") if self._is_leaving else PeerLost("it is gone")
        for handoff in self.ledger.offered_by(self):
            handoff.lost_agent = True
        if connection is not None:
            connection.lose(error)
        if self._is_leaving:
            self._is_leaving = False
            self._offers.closed()
            self._new_link()

    def offer(self, handoff: Handoff) -> None:
        plan = handoff.plan
        blocks = self.cache.take(0, plan.num_tokens) if self.is_ready else None
        if blocks is None:
            self.ledger.skip(handoff)
            return
        handoff.source = blocks
        ready = handoff.stops[0]
        self.cache.write(blocks, 0, handoff.content, ready)
        handoff.is_offered, handoff.offerer = True, self
        if len(handoff.stops) == 1:
            handoff.sealed_at = self.world.now
        self._check_cells()
        tables = {GROUP: self._ids(handoff, 0, ready)}
        more: dict[str, Any] = {"ttl_s": plan.ttl_s, "transfer_id": plan.transfer_id}
        is_sealed = len(handoff.stops) == 1
        message = offer_message(handoff.name, ready, tables, sealed=is_sealed, **more)
        state = OfferRequest(self._runner, message, self.process.loop.time() + REQUEST_S)
        offer = handoff.offer = Offer(self._runner, self._offers, state)
        self._states[offer] = state
        state.on_end = partial(self._take_back, handoff, offer)
        offer.made.then(partial(self._offered, handoff, offer))
        self._offers.submit(state)

    def _check_cells(self) -> None:
        """Check that only offers whose blocks are the engine's have a live cell."""
        offers = [one.offer for one in self.ledger.offered_by(self)]
        live = {self._states[offer].message.cell % wire.NUM_CELLS for offer in offers if offer}
        cells = self._page.view().view(np.uint64)
        if lost := {*np.flatnonzero(cells & 3 == 1).tolist()} - live:
            self.world.fail(f"cells {lost} are live, and their blocks the engine's")

    def withdraw(self, handoff: Handoff) -> None:
        if handoff.offer is not None:
            handoff.offer.withdraw()

    def park(self, handoff: Handoff) -> None:
        if handoff.offer is not None:
            handoff.offer.park()

    def see(self, notice: wire.Notice) -> None:
        if self._connection is not None:
            self._connection.events.on_notice(notice)

    def _take_back(self, handoff: Handoff, offer: Offer) -> None:
        if not self.process.is_alive:
            return
        blocks, handoff.source = handoff.source, []
        self.ledger.release(handoff, offer.outcome)
        self.cache.give_back(blocks)

    def _offered(self, handoff: Handoff, offer: Offer) -> None:
        if offer.made.exception() is not None:
            return
        handoff.offer_id = offer.offer_id
        self.ledger.on_offered(handoff, offer.ticket)
        if len(handoff.stops) > 1:
            self.world.after(handoff.plan.gap_s, self._on_loop, self._go_on, handoff, 1)

    def _go_on(self, handoff: Handoff, number: int) -> None:
        offer = handoff.offer
        if handoff.released or offer is None or not self.process.is_alive:
            return
        if number == len(handoff.stops):
            offer.seal()
            handoff.sealed_at = self.world.now
            return
        start, stop = handoff.stops[number - 1], handoff.stops[number]
        self.cache.write(handoff.source, start, handoff.content, stop)
        ids = self._ids(handoff, start, stop)
        offer.extend(stop, {GROUP: ids} if ids else {})
        self.world.after(handoff.plan.gap_s, self._on_loop, self._go_on, handoff, number + 1)

    def _ids(self, handoff: Handoff, start: int, stop: int) -> list[int]:
        """The blocks that tokens [0, stop) need beyond those of [0, start)."""
        size = self.spec.groups[0].block_size
        return handoff.source[-(-start // size) : -(-stop // size)]


class DecodeEngine(SimEngine):
    """Fetches what handoffs want."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._away: dict[Handoff, None] = {}
        """Fetches that wait for the next agent."""
        super().__init__(*args, **options)

    def leave(self) -> None:
        """Hang up. The blocks return when the agent has hung up all connections, too."""
        if not self.is_ready:
            super().leave()
        elif not self.process.loop.is_frozen:
            self._client, self.is_ready = None, False
            for attach in self._attached:
                attach.end()

    def on_hung_up(self, attach: SimAttach) -> None:
        if attach in self._attached:
            self._attached.remove(attach)
        if not self._attached:
            self._hang_up()

    def hold(self, _: Handoff, ticket: dict[str, Any]) -> None:
        """The agent may be lost: then nothing holds the offer."""
        if self.is_ready:
            self._send(wire.HoldOffer(ticket), lambda _: None)

    def fetch(self, handoff: Handoff, ticket: dict[str, Any]) -> None:
        plan = handoff.plan
        blocks = self.cache.take(plan.first_token, plan.num_tokens) if self.is_ready else None
        if blocks is None:
            self.ledger.skip_fetch(handoff)
            return
        handoff.target = blocks
        handoff.fetcher, handoff.requested_at = self, self.world.now
        first = plan.first_token // self.spec.groups[0].block_size
        handoff.asked = wire.StartFetch(
            fetch_id=handoff.name,
            ticket=ticket,
            num_tokens=plan.num_tokens,
            tables={GROUP: geometry.BlockTable.of(blocks, first_block=first)},
            first_token=plan.first_token,
            timeout_s=plan.timeout_s,
            chunk_tokens=plan.chunk_tokens,
            token=f"token-of-{handoff.name:>16}",
            priority=plan.priority,
        )
        self._ask_for(handoff)

    def _ask_for(self, handoff: Handoff) -> None:
        self._send(handoff.asked, partial(self._answered, handoff, handoff.asked))

    def _send(self, message: Any, on_reply: Callable[[Any], None]) -> None:
        if self._client is not None:
            self._client.send(message, timeout_s=math.inf, on_reply=on_reply)

    def cancel(self, handoff: Handoff) -> None:
        if handoff.fetcher is None or handoff.is_ended:
            return
        if handoff in self._away:
            self._end_away(handoff, "cancelled")
        else:
            self._send(wire.CancelFetch(handoff.name, handoff.plan.gives_up_offer), lambda _: None)

    def see(self, notice: wire.Notice) -> None:
        if notice.op == wire.BlocksFreed.op:
            handoff = self.ledger.find(wire.from_body(wire.BlocksFreed, notice.body).fetch_id)
            if not handoff.is_ended or handoff.is_freed:
                self.ledger.fail(handoff, "blocks were freed twice, or before the end")
            self._give_back(handoff)

    def lose_all(self) -> None:
        """Keep the fetches of an agent that has ended: the next one repeats them."""
        is_gone = self.agent is not None and not self.agent.process.is_alive
        for handoff in self.ledger.fetched_by(self):
            if handoff in self._away and self.process.is_alive:
                continue
            if is_gone and self.process.is_alive and not handoff.is_ended:
                self._away[handoff] = None
                handoff.repeated += 1
                handoff.asked = replace(handoff.asked, repeated=handoff.repeated)
                self.world.after(self._left_s(handoff), self._on_loop, self._see_deadline, handoff)
                continue
            if not handoff.is_ended:
                self.ledger.end(handoff, "lost", "")
            if not handoff.is_freed:
                self._give_back(handoff)
        if not self.process.is_alive:
            self._away.clear()

    def on_ready(self) -> None:
        away, self._away = list(self._away), {}
        for handoff in away:
            left_s = max(1e-3, self._left_s(handoff))
            handoff.asked = replace(handoff.asked, timeout_s=left_s)
            self._ask_for(handoff)

    def _left_s(self, handoff: Handoff) -> float:
        return max(0.0, handoff.requested_at + handoff.plan.timeout_s - self.world.now)

    def _see_deadline(self, handoff: Handoff) -> None:
        if handoff in self._away and not self._left_s(handoff):
            self._end_away(handoff, "lost")

    def _end_away(self, handoff: Handoff, outcome: str) -> None:
        del self._away[handoff]
        self.ledger.end(handoff, outcome, "")
        self._give_back(handoff)

    def _answered(self, handoff: Handoff, asked: wire.StartFetch, reply: Any) -> None:
        if handoff.asked is not asked or (self._client is None and self._attached):
            return  # it was repeated, or the engine leaves
        if isinstance(reply, wire.Fetched):
            handoff.num_bytes, handoff.attempts = reply.num_bytes, reply.attempts
            if reply.outcome is wire.Outcome.COMPLETED:
                self._check(handoff)
            self.ledger.end(handoff, reply.outcome.value, reply.code)
            if reply.blocks_free:
                self._give_back(handoff)
        elif not handoff.is_ended:
            self.ledger.end(handoff, "refused", reply.code.value)
            self._give_back(handoff)

    def _check(self, handoff: Handoff) -> None:
        span = handoff.plan.first_token, handoff.content, handoff.plan.num_tokens
        if not self.cache.has(handoff.target, *span):
            self.ledger.fail(handoff, "completed with wrong bytes")

    def _give_back(self, handoff: Handoff) -> None:
        blocks, handoff.target = handoff.target, []
        self.cache.give_back(blocks)
        self.ledger.freed(handoff)
