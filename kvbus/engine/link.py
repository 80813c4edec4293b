"""An engine's link with its agent: what a scheduler, a rank, or both in one process need of it.

the engine's threads and loops        the link's thread
offer, extend, fetch … ──calls────▶ event loop ─▶ KeptSession of the scheduler
Offer, Fetch, ended() ◀──results──────┘         └▶ KeptSession of each rank's memory
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from kvbus.engine.control import ControlSession, Others
from kvbus.engine.decode import (
    REQUESTED,
    DecodeSession,
    Fetch,
    FetchOptions,
    failed,
    new_fetch,
)
from kvbus.engine.kept import KeptSession
from kvbus.engine.later import Runner
from kvbus.engine.memory import MemorySession, OnFetched
from kvbus.engine.prefill import BlockIds, Offer, OfferOptions, PrefillSession, offer_message
from kvbus.engine.rank_memory import RankMemory
from kvbus.engine.session import ATTACH_RETRY_S, SessionOptions, greet
from kvbus.errors import (
    ClosedError,
    ErrorCode,
    KVBusError,
    LocalError,
    PeerLost,
    RequestRefused,
)
from kvbus.geometry import EngineSpec
from kvbus.protocol.attach import Welcome
from kvbus.protocol.engine import AgentRole, Outcome
from kvbus.protocol.ticket import Rendezvous

MAX_RELEASES_AT_ONCE = 8
MAX_RELEASES = 4096
RELEASE_WITHIN_S = 10.0


class Link:
    """Keeps an engine attached to the agent at ``attach_path``; open within ``with``, or
    ``async with``.

    ``memory`` is that of the ranks in this process, of `describe_tensors` or `RankMemory.allocate`;
    it is closed with the link, so links that share it are closed together. The
    engine's scheduler is here, too, unless ``control`` is False: then this is the link of a worker.
    Whether the scheduler offers or fetches is said by its agent (`role`); with ``role``, an agent
    of the other one is refused. ``others`` are the ranks of this engine at other agents, by the
    peer endpoint of each (`agent` of a link there), or as `AgentRanks`; ``access`` is what all
    links of these ranks were given, a secret of `new_secret`.

    The link outlives its agent: once one listens at the path again, the memory, which is the
    engine's, and the engine are registered with it. Offers and fetches wait for that for
    ``agent_wait_s``; those that a lost agent had begun have ended, and are told of once.

    Entering it raises why the first attempt failed, such as `PeerLost` when no agent listens within
    ``attach_timeout_s``. `start` does not wait, and an engine that can do without an agent looks at
    `wait_open` and `problem`. ``with`` and `start` give the link a thread; ``async with`` runs it
    in that event loop, which must not be held up for long (compute elsewhere). Everything may be
    called from any thread, and in any event loop: nothing but `wait_open`, `close` and entering
    waits there. Ends are heard in one of four ways: ``offer.ended.wait()`` in a thread, ``await
    offer.ended`` in a loop, ``add_callback``, which is called where the link runs, or `ended`, for
    step loops, which tells of all others.

    ``on_fetched`` is called, where the link runs, for each fetch of the engine that ended: for
    workers that tell their engine before its scheduler could. It needs a rank that is attached to
    the agent of the scheduler.
    """

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        memory: RankMemory | Iterable[RankMemory] = (),
        control: bool = True,
        role: AgentRole | None = None,
        others: Others = (),
        access: str | None = None,
        on_fetched: OnFetched | None = None,
        logger: logging.Logger = logging.getLogger("kvbus.engine"),  # noqa: B008 - one for all
        **options: Unpack[SessionOptions],
    ) -> None:
        self._memory = [memory] if isinstance(memory, RankMemory) else list(memory)
        if not (control or self._memory):
            raise LocalError("a link is of a scheduler, or of memory, or of both")
        self.engine = engine
        self._attach, self._options = Path(attach_path), options
        self._role_wanted, self._others, self._access = role, others, access
        self._patience_s = options.get("request_timeout_s", 30.0)
        self.runner = Runner()
        self._over: dict[Offer | Fetch, None] = {}
        self._releases = _Releases(self._fetching_session, logger)
        self._is_open = threading.Event()
        self._first: Future[None] = Future()
        the = f"the {role}" if role else "the"
        self._control: KeptSession[ControlSession] | None = None
        if control:
            self._control = KeptSession(
                self._open_control,
                begin=self._register,
                name=f"{the} control session",
                on_change=self._note_change,
                logger=logger,
            )
        self._memories = [
            KeptSession[MemorySession](
                partial(self._open_memory, one, on_fetched),
                begin=partial(_register_memory, one),
                name=f"{the} memory session of rank {one.rank.rank}",
                on_change=self._note_change,
                logger=logger,
            )
            for one in self._memory
        ]
        if self._control is not None:
            self._control.when_open(lambda _: self._releases.begin())
        self._keeper: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Begin to attach, in a thread of its own, without waiting for it; once."""
        loop = asyncio.new_event_loop()
        self._begin_in(loop)
        self._thread = threading.Thread(
            target=self._run, args=[loop], name="kvbus-link", daemon=True
        )
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        self.start()
        try:
            self._first.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._begin_in(asyncio.get_running_loop())
        try:
            await asyncio.wrap_future(self._first)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the agent, within ``timeout_s`` or later; all that goes on ends. Idempotent.

        For a link with a thread of its own.
        """
        if self._thread is not None and self._thread.is_alive():
            with suppress(ClosedError):  # it ends by itself
                self.runner.post(self._stop)
            self._thread.join(timeout_s)
        for memory in self._memory:
            memory.close()

    async def aclose(self) -> None:
        """As `close`, in an event loop: the one that the link was entered in."""
        if self._thread is not None:
            await asyncio.to_thread(self.close)
            return
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await self.runner.aclose()
        for memory in self._memory:
            memory.close()

    def wait_open(self, timeout_s: float) -> bool:
        """Whether everything was registered within ``timeout_s``."""
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
        """How often there was a new session with an agent, the first included."""
        return self._kept[-1].num_opened

    @property
    def agent(self) -> Welcome:
        """What the latest agent said of itself; raises why there was none yet."""
        agent: Welcome = self._kept[-1].latest.agent
        return agent

    @property
    def role(self) -> AgentRole:
        """Whether the agent takes offers or fetches; raises why there was none yet."""
        return self.agent.role

    def when_open(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, where the link runs, each time that a session is new from now on.

        That of the scheduler, if it is here. What an agent had that is gone can be made again then.
        """
        self._kept[-1].when_open(lambda _: call())

    def post(self, call: Callable[[], object]) -> None:
        """Have ``call`` called where the link runs, after what this thread posted before."""
        self.runner.post(call)

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
        without a table. What the agent refuses, the offer raises: without room, when
        ``request_timeout_s`` has passed.
        """
        offer = Offer(self.runner, offer_message(request_id, num_tokens, block_ids, **options))
        self._tell(offer)
        self.runner.post(partial(self._make, offer))
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
        fetch = new_fetch(
            self.runner,
            self.engine,
            ticket,
            num_tokens=num_tokens,
            block_ids=block_ids,
            patience_s=self._patience_s,
            **options,
        )
        fetch.release = partial(self._releases.add, fetch.message.ticket)
        self._tell(fetch)
        self.runner.post(partial(self._begin, fetch))
        return fetch

    def release(self, ticket: Mapping[str, Any]) -> None:
        """This ticket, or rendezvous, is not wanted: the prefill engine gets its blocks back now.

        Returns at once, and never fails: it is tried again, with the next agent, too. An offer that
        cannot be released expires by itself. Also right after a fetch that was refused or failed.
        """
        self.runner.post(partial(self._releases.add, dict(ticket)))

    def ended(self) -> list[Offer | Fetch]:
        """The offers and fetches that ended since the last call; never waits.

        A fetch whose blocks were not free by then comes once more when they are. Those that
        somebody waits for, or has a call made for, are left out.
        """
        return [one for one in list(self._over) if self._over.pop(one, self) is None]

    def record(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Mark what ``stream``, or the current one of this thread, was given so far.

        For ranks with CUDA memory, before each `offer`, `extend`, `seal` and `fetch` that is about
        their blocks: the agent copies after that work. Returns at once. Raises `LocalError` when
        there is no such rank here.
        """
        if not self._memories:
            raise LocalError("record() is for the link of a rank with CUDA memory")
        for kept in self._memories:
            kept.latest.record(stream)

    @property
    def _kept(self) -> list[KeptSession[Any]]:
        return [*self._memories, *([] if self._control is None else [self._control])]

    @asynccontextmanager
    async def _open_control(self) -> AsyncIterator[ControlSession]:
        role = (await self._greet()).role
        if self._role_wanted not in (None, role):
            raise LocalError(
                f"the agent at {self._attach} is for {role} engines, not {self._role_wanted}"
            )
        kind = PrefillSession if role is AgentRole.PREFILL else DecodeSession
        async with kind(self._attach, self.engine, **self._options) as session:
            session.runner = self.runner
            yield session

    async def _greet(self) -> Welcome:
        """The agent, as soon as one listens and is ready; within ``attach_timeout_s``."""
        deadline = time.monotonic() + self._options.get("attach_timeout_s", 0.0)
        while True:
            try:
                return await greet(self._attach)
            except (PeerLost, RequestRefused):
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(ATTACH_RETRY_S)

    def _open_memory(
        self, memory: RankMemory, on_fetched: OnFetched | None
    ) -> AbstractAsyncContextManager[MemorySession]:
        return MemorySession(
            self._attach,
            self.engine,
            memory.rank.rank,
            on_fetched=on_fetched,
            access=self._access,
            **self._options,
        )

    async def _register(self, session: ControlSession) -> None:
        await session.register(others=self._others, access=self._access)
        await session.ready()

    def _make(self, offer: Offer) -> None:
        try:
            session = self._latest()
            if not isinstance(session, PrefillSession):
                message = f"a {self.role} agent takes no offers: a prefill agent is needed"
                raise LocalError(message, code=ErrorCode.INVALID)
            session.make(offer)
        except KVBusError as error:
            offer.end(error)

    def _begin(self, fetch: Fetch) -> None:
        try:
            session = self._latest()
            if not isinstance(session, DecodeSession):
                message = f"a {self.role} agent fetches nothing: a decode agent is needed"
                raise LocalError(message, code=ErrorCode.INVALID)
            session.begin(fetch)
        except KVBusError as error:
            fetch.end(failed(fetch, error, stage=REQUESTED, blocks_free=True))

    def _fetching_session(self) -> DecodeSession | None:
        session = None if self._control is None else self._control.session
        return session if isinstance(session, DecodeSession) else None

    def _latest(self) -> ControlSession:
        """The session that is open, or was; raises why there was none."""
        if self._control is None:
            raise LocalError("this is the link of a worker: offer and fetch where control is")
        if self._control.num_opened == 0 and self._control.problem is not None:
            raise self._control.problem.with_traceback(None)  # one error, raised often
        return self._control.latest

    def _tell(self, handle: Offer | Fetch) -> None:
        """Have `ended` tell of it, unless somebody else is told."""

        def note() -> None:
            if not handle.ended.is_observed:
                self._over[handle] = None

        def note_freed() -> None:
            if isinstance(handle, Fetch) and handle.notice and not handle.notice.blocks_free:
                note()

        handle.ended.then(note)
        handle.ended.on_observed = lambda: self._over.pop(handle, None)
        if isinstance(handle, Fetch):
            handle.freed.then(note_freed)

    def _note_change(self) -> None:
        problem = self.problem
        if problem is None:
            self._is_open.set()
        else:
            self._is_open.clear()
        if not self._first.done():
            if problem is None:
                self._first.set_result(None)
            elif any(kept.has_failed for kept in self._kept):
                self._first.set_exception(problem)

    def _begin_in(self, loop: asyncio.AbstractEventLoop) -> None:
        self.runner.begin(loop)
        self._keeper = loop.create_task(self._keep())

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            if self._keeper is not None:
                with suppress(asyncio.CancelledError):
                    loop.run_until_complete(self._keeper)
        finally:
            loop.run_until_complete(self.runner.aclose())
            loop.close()

    def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep(self) -> None:
        """The scheduler leaves before the memory does."""
        async with asyncio.TaskGroup() as tasks:
            for kept in self._memories:
                tasks.create_task(kept.run())
            if self._control is not None:
                await self._control.run()


async def _register_memory(memory: RankMemory, session: MemorySession) -> None:
    await session.register(memory.rank, memory.storages, direct=memory.direct)


class _Releases:
    """The tickets that one decode engine does not need.

    They wait while there is no agent, and for each other, so that fetches find it free.
    """

    def __init__(self, session: Callable[[], DecodeSession | None], logger: logging.Logger) -> None:
        self._session, self._logger = session, logger
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_RELEASES)
        self._num_under_way = 0

    def add(self, ticket: dict[str, Any]) -> None:
        """Release it, as soon as it is its turn."""
        self._waiting.append(ticket)
        self.begin()

    # A fetch of no tokens of a sealed offer takes it, and so completes it. Of one that is never
    # sealed, or never made, it would wait: that one is cancelled, which withdraws the offer.
    def begin(self) -> None:
        """Go on, as there is an agent, or room."""
        session = self._session()
        while session is not None and self._waiting and self._num_under_way < MAX_RELEASES_AT_ONCE:
            ticket = self._waiting.popleft()
            stop = ticket.get("num_tokens", 0)
            try:
                fetch = session.fetch(ticket, num_tokens=stop, first_token=stop, block_ids={})
            except KVBusError:  # it has no room for a request, or has ended: later
                self._waiting.append(ticket)
                return
            self._num_under_way += 1
            fetch.ended.then(partial(self._on_ended, ticket, session, fetch))
            cancel = partial(fetch.cancel, release_offer=True)
            if Rendezvous.is_one(ticket):
                cancel()
            else:
                asyncio.get_running_loop().call_later(RELEASE_WITHIN_S, cancel)

    def _on_ended(self, ticket: dict[str, Any], session: DecodeSession, fetch: Fetch) -> None:
        self._num_under_way -= 1
        notice = fetch.notice
        if notice is None or notice.stage == "lost" or notice.code == ErrorCode.DRAINING:
            self._waiting.append(ticket)  # the agent is gone, or goes: the next one does it
            if self._session() is session:
                return
        elif notice.outcome is Outcome.FAILED:
            self._logger.info(
                "kvbus: the offer of request %r, which is not wanted, was not released: %s [%s]",
                ticket.get("request_id"),
                notice.message,
                notice.code,
            )
        self.begin()
