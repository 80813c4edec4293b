"""An engine's link with its agent: calls from any thread run in the link's event loop."""

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

from kvbus.engine.attached_rank import AttachedRank, gpu_memory_of
from kvbus.engine.connection import Connection, ReconnectingConnection
from kvbus.engine.fetches import Fetches
from kvbus.engine.handles import Fetch, Offer
from kvbus.engine.later import Completion, EndedQueue, Runner
from kvbus.engine.messages import BlockIds, FetchOptions, OfferOptions, offer_message
from kvbus.engine.offers import OfferRequest, Offers
from kvbus.engine.rank_memory import RankMemory
from kvbus.engine.retrying import RequestRetrier
from kvbus.engine.sequence import PageName, Recorder
from kvbus.errors import (
    ClosedError,
    KVBusError,
    LocalError,
    RequestTimeout,
)
from kvbus.geometry import EngineSpec
from kvbus.memory.run_copy import swap_word
from kvbus.memory.segment import SharedSegment
from kvbus.protocol.attach import Welcome
from kvbus.protocol.commit_cell import CELLS_BYTES
from kvbus.protocol.engine import (
    AgentRanks,
    AgentRole,
    AwaitReady,
    Register,
    Republished,
)


class Link:
    """A link between an engine and the agent whose attach socket is ``attach_path``.

    When the agent restarts, the link publishes live offers again and repeats live fetches. Without
    an agent, an offer lives for ``ttl_s``, and for ``agent_wait_s`` at least.

    ``memory`` is that of the ranks in this process. The link closes it: close links that share
    memory together. With ``control`` False, this is a worker's link: it registers memory, and
    neither offers nor fetches. ``role`` refuses an agent of the other role. ``remote_ranks`` lists
    the ranks of this engine at other agents. ``rank_secret`` is one secret (`new_secret`) for all
    links of such an engine. ``request_timeout_s`` bounds replies, and retries at a full agent.

    Enter the link before its first call. Entering raises the first error, such as `PeerLost` after
    ``attach_timeout_s`` without an agent. ``with`` and `start` use a new thread. ``async with``
    uses the running event loop: do not block it. Calls are safe in any thread and event loop. Only
    entering, `wait_open`, `close`, `Offer.ticket` and waiting for a `Completion` block.
    """

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        memory: RankMemory | Iterable[RankMemory] = (),
        control: bool = True,
        role: AgentRole | None = None,
        remote_ranks: Iterable[AgentRanks] = (),
        rank_secret: str | None = None,
        logger: logging.Logger = logging.getLogger("kvbus.engine"),  # noqa: B008 - one for all
        attach_timeout_s: float = 0.0,
        request_timeout_s: float = 30.0,
        agent_wait_s: float = 10.0,
    ) -> None:
        self._memory = [memory] if isinstance(memory, RankMemory) else list(memory)
        if not (control or self._memory):
            raise LocalError("a link is of a scheduler, or of memory, or of both")
        self.engine = engine
        self._remote_ranks, self._instance = tuple(remote_ranks), uuid.uuid4().hex
        self._request_timeout_s = request_timeout_s
        self._connect = partial(
            Connection,
            attach_path,
            engine.engine_id,
            role=role,
            attach_timeout_s=attach_timeout_s,
            request_timeout_s=request_timeout_s,
        )
        self.runner = Runner()
        cells = self._new_cells() if control else None
        self._offers = Offers(cells, agent_wait_s=agent_wait_s)
        self._fetches = Fetches(
            self.runner,
            engine,
            has_remote_ranks=bool(self._remote_ranks),
            request_timeout_s=request_timeout_s,
            logger=logger,
            agent_wait_s=agent_wait_s,
        )
        self._retriers: dict[AgentRole, RequestRetrier[Any]] = {
            AgentRole.PREFILL: self._offers,
            AgentRole.DECODE: self._fetches,
        }
        self._over: EndedQueue[Offer | Fetch] = EndedQueue()
        self._on_change: list[Callable[[], None]] = []
        self._is_open, self._closes_itself = threading.Event(), False
        self._first: Completion[None] = Completion()
        self._recorder = Recorder()
        self._ranks = [
            AttachedRank(engine, one, rank_secret, self._recorder) for one in self._memory
        ]
        self._owned: list[RankMemory | SharedSegment | Recorder] = [*self._memory, self._recorder]
        if cells is not None:
            self._ranks[0].cells = cells
            self._owned.append(cells)
        self._kept = self._sessions(role, control=control, logger=logger)
        self._control = self._kept[-1] if control else None
        self._refuse_requests_of_worker()
        self._keeper: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def _refuse_requests_of_worker(self) -> None:
        if self._control is None:
            for retrier in self._retriers.values():
                retrier.problem = LocalError("a worker's link neither offers nor fetches")

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> Self:
        """Attach in the running ``loop`` or a new thread. Call once; never blocks."""
        link_loop = loop or asyncio.new_event_loop()
        self.runner.begin(link_loop)
        self._keeper = link_loop.create_task(self._keep())
        if loop is None:
            self._thread = threading.Thread(
                target=self._run, args=[link_loop], name="kvbus-link", daemon=True
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
        """Detach, end all operations, and wait up to ``timeout_s``. Idempotent.

        In a callback it does not wait. In an event loop, use ``await aclose()``.
        """
        if self._thread is None and self._keeper is not None:
            raise LocalError("this link runs in an event loop of the engine: use 'await aclose()'")
        if self._thread is not None and self._thread.is_alive():
            self._closes_itself = self._thread is threading.current_thread()
            with suppress(ClosedError):  # it is ending already
                self.runner.post(self._stop)
            if self._closes_itself:
                return
            self._thread.join(timeout_s)
        self._close_memory()

    async def aclose(self) -> None:
        """Close the link, in the event loop that entered it."""
        if self._thread is not None:
            await asyncio.to_thread(self.close)
            return
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with anyio.CancelScope(shield=True):  # up to `GOODBYE_S`
                await asyncio.gather(keeper, return_exceptions=True)
                await self.runner.aclose()
        self._close_memory()

    def _close_memory(self) -> None:
        for memory in self._owned:
            memory.close()

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until everything is registered; return whether it is.

        Raises `LocalError` in the link's event loop if it would block.
        """
        if not self.is_open and timeout_s > 0:
            self.runner.check_may_wait()
        return self._is_open.wait(timeout_s)

    @property
    def is_open(self) -> bool:
        """Whether everything is registered at an agent."""
        return self._is_open.is_set()

    @property
    def problem(self) -> KVBusError | None:
        """Why the link is not open; None if it is."""
        closed = [kept for kept in self._kept if kept.problem is not None]
        return max(closed, key=lambda kept: kept.has_failed).problem if closed else None

    @property
    def num_opened(self) -> int:
        return self._kept[-1].num_opened

    @property
    def connection(self) -> Connection:
        """The latest connection, perhaps lost, of the scheduler or the last rank.

        Raises `problem` when there was none yet.
        """
        return self._kept[-1].latest

    @property
    def agent(self) -> Welcome:
        """The latest agent. Raises `problem` when there was none yet."""
        return self.connection.agent

    @property
    def role(self) -> AgentRole:
        return self.agent.role

    def when_changed(self, call: Callable[[], None]) -> None:
        """Run ``call`` in the link's thread or loop whenever `is_open` changes."""
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

        Do not write to the blocks or reuse them before `Offer.ended`; unfilled ones are writable
        until `Offer.extend` names them. A state has one block.

        Raises `GeometryError` for ids that are not unsigned 32-bit integers, and for
        ``first_blocks`` of a group without a table. ``await``, `Offer.ticket` and `Offer.ended`
        raise the agent's refusal: ``busy`` if it stays full for ``request_timeout_s``.
        """
        message = offer_message(request_id, num_tokens, block_ids, **options)
        state = OfferRequest(self.runner, message, time.monotonic() + self._request_timeout_s)
        offer = Offer(self.runner, self._offers, state)
        state.on_end = partial(self._over.note, offer)
        self.runner.post(partial(self._offers.submit, state))
        return offer

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int | None = None,
        block_ids: BlockIds,
        **options: Unpack[FetchOptions],
    ) -> Fetch:
        """Fetch tokens ``first_token`` to ``num_tokens`` - 1 into ``block_ids``.

        Each group lists exactly the blocks of its `GroupSpec.positions`, in order of position. With
        a window, only the last ``window`` tokens before ``num_tokens`` count. A state has one
        block. Groups without positions may be absent. Without ``num_tokens``, it takes all tokens
        of the sealed offer that fit; not for engines with windows, or with ranks at other agents.

        `Fetch.ended` has the result, with stage ``requested`` for a refusal. A full agent is
        retried for ``timeout_s`` or ``request_timeout_s``. A silent one fails the fetch after that
        time, with stage ``silent``. Raises `GeometryError` for invalid ids and unknown groups.
        """
        state = self._fetches.new(ticket, num_tokens=num_tokens, block_ids=block_ids, **options)
        fetch = Fetch(self._fetches, state)
        state.on_end = partial(self._over.note, fetch)
        self.runner.post(partial(self._fetches.submit, state))
        return fetch

    def report_blocks(self, *, free: int, low: int) -> None:
        """Report free blocks; while they are below ``low``, a prefill agent parks offers early.

        Never blocks or raises. Call it in each step: only a change is sent.
        """
        if self._offers.is_short is not (free < low):
            self._offers.is_short = free < low
            with suppress(ClosedError):
                self.runner.post(self._offers.report_blocks)

    def hold(self, ticket: Mapping[str, Any]) -> None:
        """Keep the offer of this ticket or rendezvous while its request waits in a queue.

        Call it as soon as the request arrives. The hold ends when the ticket is fetched or
        released, when this link or its process ends, and after the prefill agent's ``max_hold_s``.
        Never blocks or raises. A ticket that is fetched within 0.2 s costs the agents nothing.
        """
        self._fetches.holds.add(ticket)

    def release(self, ticket: Mapping[str, Any]) -> None:
        """Release the offer of this ticket or rendezvous, also after a failed fetch.

        Never blocks or raises, and works outside the link's lifetime.
        """
        self._fetches.releases.add(dict(ticket))

    def ended(self) -> list[Offer | Fetch]:
        """Return the offers and fetches that ended since the last call; never blocks.

        Those with a waiter or a callback are left out. If the blocks of a fetch are not free, it
        is reported again when they are, or when ``freed`` raises. Call it in each step, or never:
        from the first call on, the link keeps ended handles until the next call.
        """
        return self._over.take()

    def record(
        self, number: int | None = None, *, stream: "torch.cuda.Stream | int | None" = None
    ) -> int:
        """Return a number that is reached when the work so far on ``stream`` has ended.

        Pass it as ``after`` to `offer`, `extend`, `seal` and `fetch`: the agent does not touch the
        blocks before. ``stream`` is torch's current one by default, or a ``CUstream``. With host
        memory, the number is reached at once.

        A process without memory, such as a scheduler, may choose the ``number`` for the process
        that calls this. Numbers of one stream are equal modulo 512 and ascend, as 512 * step does.
        Raises `LocalError` for a link without memory, and `SegmentError` if CUDA fails.
        """
        return self._recorder.record(number, stream)

    @property
    def sequence_pages(self) -> tuple[PageName, ...]:
        """The pages that `record` writes, for a scheduler that wants to read them."""
        return self._recorder.names

    def _sessions(
        self, role: AgentRole | None, *, control: bool, logger: logging.Logger
    ) -> list[ReconnectingConnection]:
        keep = partial(
            ReconnectingConnection, self._connect, on_change=self._note_change, logger=logger
        )
        the = f"the {role}" if role else "the"
        kept = [
            keep(rank.register, name=f"{the} memory session of rank {rank.number}")
            for rank in self._ranks
        ]
        if control:
            name = f"{the} control session"
            kept.append(keep(self._register, name=name, on_open=self._on_open))
        return kept

    def _new_cells(self) -> SharedSegment | None:
        """All ranks must be here: this process closes a cell before it writes to the blocks."""
        storages = [one for memory in self._memory for one in memory.storages.values()]
        on_host = all(gpu_memory_of(one) is None for one in storages)
        is_whole = len(self._memory) == self.engine.num_ranks
        return (
            SharedSegment(CELLS_BYTES) if is_whole and on_host and swap_word is not None else None
        )

    async def _register(self, connection: Connection) -> None:
        """After the first time, wait for the ranks without a limit."""
        role, offers = connection.agent.role, self._offers
        self._fetches.greeted(connection)
        republishes = role is AgentRole.PREFILL and offers.republishes
        register = Register(
            engine=self.engine,
            remote_ranks=self._remote_ranks,
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

    def _on_open(self, connection: Connection) -> None:
        role = connection.agent.role
        for needed, retrier in self._retriers.items():
            if role is needed:
                retrier.opened(connection)
            else:
                retrier.problem = LocalError(f"there is a {role} agent: a {needed} agent is needed")

    def _note_change(self) -> None:
        problem = self.problem
        if self._control is not None and self._control.num_opened == 0:
            for retrier in self._retriers.values():
                retrier.problem = self._control.problem or retrier.problem
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
