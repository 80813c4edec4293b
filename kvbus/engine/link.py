"""An engine's link with its agent: what a scheduler, a rank, or both in one process need of it.

an engine's threads and loops        the link's event loop
offer, extend, fetch … ──calls────▶ Offers, Fetches ─▶ connection of the scheduler
Offer, Fetch, ended() ◀──results──────┘                connection of each rank's memory
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import anyio
import torch

from kvbus.engine.asking import Asking
from kvbus.engine.connection import Connection, KeptConnection
from kvbus.engine.fetches import Fetch, Fetches, FetchOptions
from kvbus.engine.later import Ended, Later, Runner
from kvbus.engine.offers import BlockIds, Offer, OfferOptions, Offers, offer_message
from kvbus.engine.rank_memory import RankMemory
from kvbus.errors import (
    ClosedError,
    GeometryError,
    KVBusError,
    LocalError,
    RequestTimeout,
)
from kvbus.geometry import EngineSpec
from kvbus.memory.cuda import CudaEvent, CudaStorage
from kvbus.memory.run_copy import swap_word
from kvbus.memory.segment import SharedSegment
from kvbus.protocol.attach import PassCuda, PassSegment, Welcome
from kvbus.protocol.engine import AgentRanks, AgentRole, AwaitReady, Register, Republished
from kvbus.protocol.word import WORDS_BYTES

WORDS_ID = "kvbus-words"


class Link:
    """Keeps an engine attached to the agent at ``attach_path``; open within ``with``, or
    ``async with``.

    ``memory`` is that of the ranks in this process, of `describe_tensors` or `RankMemory.allocate`;
    it is closed with the link, so links that share it are closed together. The
    engine's scheduler is here, too, unless ``control`` is False: then this is the link of a worker.
    Whether the scheduler offers or fetches is said by its agent (`role`); with ``role``, an agent
    of the other one is refused. ``others`` are the ranks of this engine at other agents, by
    the peer endpoint of each (`agent` of a link there); ``access`` is what all links of these ranks
    were given, a secret of `new_secret`: who asks about a rank that is not at the engine's home
    shows it. An answer is waited for, and an agent without room is asked, for
    ``request_timeout_s``.

    The link outlives its agent. Once an agent listens at the path again, the link registers the
    engine and its memory, publishes live offers again, and repeats live fetches. A fetch ends at
    its deadline. An offer ends at its ``ttl_s``, but not before ``agent_wait_s``.

    Entering it raises why the first attempt failed, such as `PeerLost` when no agent listens within
    ``attach_timeout_s``. `start` does not wait, and an engine that can do without an agent looks at
    `wait_open` and `problem`. ``with`` and `start` give the link a thread; ``async with`` runs it
    in that event loop, which must not be held up for long (compute elsewhere). Everything may be
    called from any thread, and in any event loop: nothing but `wait_open`, `close` and entering
    waits there. Ends are heard in one of four ways: ``offer.ended.wait()`` in a thread, ``await
    offer.ended`` in a loop, ``add_callback``, which is called where the link runs, or `ended`, for
    step loops, which tells of all others.
    """

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        memory: RankMemory | Iterable[RankMemory] = (),
        control: bool = True,
        role: AgentRole | None = None,
        others: Iterable[AgentRanks] = (),
        access: str | None = None,
        logger: logging.Logger = logging.getLogger("kvbus.engine"),  # noqa: B008 - one for all
        attach_timeout_s: float = 0.0,
        request_timeout_s: float = 30.0,
        agent_wait_s: float = 10.0,
    ) -> None:
        self._memory = [memory] if isinstance(memory, RankMemory) else list(memory)
        if not (control or self._memory):
            raise LocalError("a link is of a scheduler, or of memory, or of both")
        self.engine = engine
        self._others, self._instance = tuple(others), uuid.uuid4().hex
        self._patience_s = request_timeout_s
        self._connect = partial(
            Connection,
            attach_path,
            engine.engine_id,
            role=role,
            attach_timeout_s=attach_timeout_s,
            request_timeout_s=request_timeout_s,
        )
        self.runner = Runner()
        words = self._new_words() if control else None
        self._offers = Offers(words, agent_wait_s=agent_wait_s)
        self._fetches = Fetches(
            self.runner,
            engine,
            has_others=bool(self._others),
            patience_s=request_timeout_s,
            logger=logger,
            agent_wait_s=agent_wait_s,
        )
        self._asking: dict[AgentRole, Asking[Any]] = {
            AgentRole.PREFILL: self._offers,
            AgentRole.DECODE: self._fetches,
        }
        self._over: Ended[Offer | Fetch] = Ended()
        self._on_change: list[Callable[[], None]] = []
        self._is_open = threading.Event()
        self._first: Later[None] = Later()
        self._ranks = [AttachedRank(engine, one, access) for one in self._memory]
        self._owned: list[RankMemory | SharedSegment] = [*self._memory]
        if words is not None:
            self._ranks[0].words = words
            self._owned.append(words)
        keep = partial(KeptConnection, self._connect, on_change=self._note_change, logger=logger)
        the = f"the {role}" if role else "the"
        self._kept = [
            keep(rank.register, name=f"{the} memory session of rank {rank.number}")
            for rank in self._ranks
        ]
        self._control: KeptConnection | None = None
        if control:
            self._control = keep(
                self._register, name=f"{the} control session", on_open=self._note_open
            )
            self._kept.append(self._control)
        else:
            for asking in self._asking.values():
                asking.problem = LocalError("a worker's link neither offers nor fetches")
        self._keeper: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._closes_itself = False

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> Self:
        """Begin to attach, without waiting for it; once.

        In ``loop``, which is the running one, or in a thread of the link.
        """
        runs_in = loop or asyncio.new_event_loop()
        self.runner.begin(runs_in)
        self._keeper = runs_in.create_task(self._keep())
        if loop is None:
            self._thread = threading.Thread(
                target=self._run, args=[runs_in], name="kvbus-link", daemon=True
            )
            self._thread.start()
        return self

    def __enter__(self) -> Self:
        self.start()
        try:
            self._first.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self.start(asyncio.get_running_loop())
        try:
            await self._first
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the agent, within ``timeout_s`` or later; all that goes on ends. Idempotent.

        In a callback it returns at once, and the link's thread closes the link. Raises `LocalError`
        for a link that runs in an event loop of the engine: ``await aclose()`` there.
        """
        if self._thread is None and self._keeper is not None:
            raise LocalError("this link runs in an event loop of the engine: use 'await aclose()'")
        if self._thread is not None and self._thread.is_alive():
            self._closes_itself = self._thread is threading.current_thread()
            with suppress(ClosedError):  # it ends by itself
                self.runner.post(self._stop)
            if self._closes_itself:
                return
            self._thread.join(timeout_s)
        self._close_memory()

    async def aclose(self) -> None:
        """As `close`, in an event loop: the one that the link was entered in."""
        if self._thread is not None:
            await asyncio.to_thread(self.close)
            return
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with anyio.CancelScope(shield=True):  # an agent that answers nothing is left soon
                await asyncio.gather(keeper, return_exceptions=True)
                await self.runner.aclose()
        self._close_memory()

    def _close_memory(self) -> None:
        for memory in self._owned:
            memory.close()

    def wait_open(self, timeout_s: float) -> bool:
        """Whether everything was registered within ``timeout_s``.

        Raises `LocalError` in the event loop of the link while it is not open.
        """
        if not self.is_open and timeout_s > 0:
            self.runner.check_may_wait()
        return self._is_open.wait(timeout_s)

    @property
    def is_open(self) -> bool:
        """Whether everything is registered with an agent."""
        return self._is_open.is_set()

    @property
    def problem(self) -> KVBusError | None:
        """Why it is not open; None while it is."""
        closed = [kept for kept in self._kept if kept.problem is not None]
        return max(closed, key=lambda kept: kept.has_failed).problem if closed else None

    @property
    def num_opened(self) -> int:
        """How often there was a new agent, the first included."""
        return self._kept[-1].num_opened

    @property
    def connection(self) -> Connection:
        """The latest connection of the scheduler, or of the last rank: for requests of the protocol
        that have no call here. It may have ended. Raises why there was none yet.
        """
        return self._kept[-1].latest

    @property
    def agent(self) -> Welcome:
        """What the latest agent said of itself; raises why there was none yet."""
        return self.connection.agent

    @property
    def role(self) -> AgentRole:
        """Whether the agent takes offers or fetches; raises why there was none yet."""
        return self.agent.role

    def when_changed(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, where the link runs, each time that `is_open` changes from now on.

        Once it is open again, what an agent had that is gone can be made again.
        """
        self._on_change.append(call)

    def offer(
        self,
        request_id: str,
        *,
        num_tokens: int,
        block_ids: BlockIds,
        **options: Unpack[OfferOptions],
    ) -> Offer:
        """Offer ``num_tokens`` tokens that lie in ``block_ids`` (by group, in order of position).

        Returns at once. From now on until `Offer.ended` the blocks must not be written or given to
        another request; blocks that are yet to be filled may be written before `Offer.extend` names
        them. A state has one block. `OfferOptions` says what else can be told.

        Raises `GeometryError` for ids that are no unsigned 32-bit integers and for a first block
        without a table. What the agent refuses, the offer raises: without room, or of an agent that
        answers nothing any more, when ``request_timeout_s`` has passed.
        """
        message = offer_message(request_id, num_tokens, block_ids, **options)
        offer = Offer(self.runner, message, time.monotonic() + self._patience_s)
        offer.on_end = self._over.note
        self.runner.post(partial(self._offers.ask, offer))
        return offer

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int | None = None,
        block_ids: BlockIds,
        **options: Unpack[FetchOptions],
    ) -> Fetch:
        """Ask for tokens [first_token, num_tokens) into ``block_ids`` (by group, by position).

        Each group gives exactly the blocks of its `GroupSpec.positions`: of these tokens; with a
        window, of those among the last ``window`` of ``num_tokens``; of a state, its one block. A
        group that needs none may be left out. `FetchOptions` says what else can be told. Without
        ``num_tokens``, it is of what the offer has when it is sealed, at most what the blocks hold
        (`Fetched.num_tokens`); not for an engine with windows, or with ranks at other agents.

        Returns at once; `Fetch.ended` says how it ends, a refusal by the agent included (its stage
        is ``requested``). An agent without room is asked again until ``timeout_s`` or
        ``request_timeout_s`` have passed. One that answers nothing any more cannot say so: the
        fetch fails then with stage ``silent``, after the same time. Raises `GeometryError` for ids
        that are no unsigned 32-bit integers, or of no group.
        """
        fetch = self._fetches.new(ticket, num_tokens=num_tokens, block_ids=block_ids, **options)
        fetch.on_end = self._over.note
        self.runner.post(partial(self._fetches.ask, fetch))
        return fetch

    def release(self, ticket: Mapping[str, Any]) -> None:
        """This ticket, or rendezvous, is not wanted: the prefill engine gets its blocks back now.

        Returns at once, and never raises, also before the link is open and after its end. It is
        tried again, with the next agent, too. An offer that cannot be released expires by itself.
        Also right after a fetch that was refused or failed.
        """
        self._fetches.releases.add(dict(ticket))

    def ended(self) -> list[Offer | Fetch]:
        """The offers and fetches that ended since the last call; never waits.

        Each is reported once. A fetch whose blocks were not free at its report
        (`Fetch.are_blocks_free`) is reported a second time when they are, or when no agent will
        ever say so. Handles that the engine waits for or has a callback for are left out.

        Call it in each step, or never: from the first call on the link keeps what has ended until
        the next call. Before that, it keeps no handle that the engine has dropped.
        """
        return self._over.take()

    def record(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Mark what ``stream``, or the current one of this thread, was given so far.

        For ranks with CUDA memory, before each `offer`, `extend`, `seal` and `fetch` that is about
        their blocks: the agent copies after that work. Returns at once. Raises `LocalError` when
        there is no such rank here.
        """
        events = [rank.event for rank in self._ranks if rank.event is not None]
        if not events:
            raise LocalError("record() is for the link of a rank with CUDA memory")
        for event in events:
            event.record(stream)

    def _new_words(self) -> SharedSegment | None:
        """A page where all of the engine is in this process, which closes the words before it
        writes to blocks again, and on the host, where a reader of this machine can map it.
        """
        storages = [one for memory in self._memory for one in memory.storages.values()]
        on_host = not any(isinstance(one, CudaStorage) for one in storages)
        is_whole = len(self._memory) == self.engine.num_ranks
        return (
            SharedSegment(WORDS_BYTES) if is_whole and on_host and swap_word is not None else None
        )

    async def _register(self, connection: Connection) -> None:
        """As the engine's scheduler; after the first time, however long a rank takes."""
        role, offers = connection.agent.role, self._offers
        self._fetches.greeted(connection)
        republishes = role is AgentRole.PREFILL and offers.republishes
        register = Register(
            engine=self.engine,
            others=self._others,
            role=role,
            instance=self._instance,
            republishes=republishes,
        )
        await connection.request(register)
        memory = ""
        while not memory:
            try:
                memory = (await connection.request(AwaitReady())).memory
            except RequestTimeout:
                if self.num_opened == 0:
                    raise
        if role is AgentRole.PREFILL:
            offers.check_memory(memory)
            offers.opened(connection)
        if republishes:
            await connection.request(Republished(offers.ended_lately()))

    def _note_open(self, connection: Connection) -> None:
        role = connection.agent.role
        for needed, asking in self._asking.items():
            if role is needed:
                asking.opened(connection)
            else:
                asking.problem = LocalError(f"there is a {role} agent: a {needed} agent is needed")

    def _note_change(self) -> None:
        problem = self.problem
        if self._control is not None and self._control.num_opened == 0:
            for asking in self._asking.values():
                asking.problem = self._control.problem or asking.problem
        if self.is_open is not (problem is None):
            if problem is None:
                self._is_open.set()
            else:
                self._is_open.clear()
            for call in self._on_change:
                call()
        if not self._first.done():
            if problem is None:
                self._first.settle(None)
            elif any(kept.has_failed for kept in self._kept):
                self._first.settle(problem)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            if self._keeper is not None:
                with suppress(asyncio.CancelledError):
                    loop.run_until_complete(self._keeper)
        finally:
            loop.run_until_complete(self.runner.aclose())
            loop.close()
        if self._closes_itself:
            self._close_memory()

    def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep(self) -> None:
        """The scheduler leaves before the memory does."""
        async with asyncio.TaskGroup() as tasks:
            for kept in self._kept:
                if kept is not self._control:
                    tasks.create_task(kept.run())
            try:
                if self._control is not None:
                    await self._control.run()
            finally:
                self._offers.closed()
                self._fetches.closed()


class AttachedRank:
    """The memory of one rank, registered with each agent that comes."""

    def __init__(self, engine: EngineSpec, memory: RankMemory, access: str | None) -> None:
        self.words: SharedSegment | None = None
        self.number = memory.rank.rank
        self._engine, self._memory, self._access = engine, memory, access
        self._instance = uuid.uuid4().hex
        self.event: CudaEvent | None = None
        if {segment.segment_id for segment in memory.rank.segments} != memory.storages.keys():
            raise GeometryError("storages and the rank's segments have different ids")

    async def register(self, connection: Connection) -> None:
        """Pass the memory to the agent, and say what it is."""
        for segment_id, storage in self._memory.storages.items():
            if isinstance(storage, CudaStorage):
                await self._pass_cuda(connection, segment_id, storage)
            else:
                await connection.pass_memory(
                    PassSegment(
                        segment_id=segment_id,
                        size_bytes=storage.size_bytes,
                        direct=self._memory.direct,
                    ),
                    storage.fd,
                )
        if self.words is not None and connection.agent.role is AgentRole.PREFILL:
            page = PassSegment(WORDS_ID, self.words.size_bytes, words=True)
            await connection.pass_memory(page, self.words.fd)
        register = Register(
            engine=self._engine,
            rank=self._memory.rank,
            access=self._access,
            instance=self._instance,
        )
        await connection.request(register)

    async def _pass_cuda(
        self, connection: Connection, segment_id: str, storage: CudaStorage
    ) -> None:
        if self.event is None:
            self.event = CudaEvent(storage.ordinal)
        message = PassCuda(
            segment_id=segment_id,
            device=storage.device,
            handle=storage.handle,
            offset_bytes=storage.offset_bytes,
            size_bytes=storage.size_bytes,
            event=self.event.handle,
        )
        await connection.pass_memory(message)
