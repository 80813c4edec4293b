"""One session of an engine process with its agent: attach connection, requests, notices.

Refuses to outlive the agent: when it goes, everything that waits fails with `PeerLost`.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Self, TypedDict, TypeVar

import anyio

from kvbus.bus import RequestClient, new_boot_id, new_context
from kvbus.engine.later import Runner, running_loop
from kvbus.errors import (
    AgentHungUp,
    ClosedError,
    ErrorCode,
    KVBusError,
    LocalError,
    PeerLost,
    RequestRefused,
)
from kvbus.geometry import EngineSpec
from kvbus.memory.attach import AttachClient
from kvbus.memory.attach.place import check_folder
from kvbus.protocol.attach import Hello, Welcome
from kvbus.protocol.engine import AgentRole, AwaitReady, Detach, Leaving
from kvbus.protocol.envelope import PROTOCOL_VERSION, Notice
from kvbus.protocol.message import R, Request, from_body, to_body

GOODBYE_S = 1.0
ATTACH_RETRY_S = 0.05
LOOK_S = 1.0
ENDS_WITHIN_S = 1.0
"""A process that ends closes its connections first."""
IPC = "ipc://"
NOT_BEGUN = (ErrorCode.DRAINING, ErrorCode.CLOSED, ErrorCode.STALE)
"""Codes of an agent that ends, and of one that has taken leave of the session."""
MAX_PENDING = 1 << 20
"""Requests without a reply: as many as the largest `max_handoffs` of an agent."""

T = TypeVar("T")


class SessionOptions(TypedDict, total=False):
    """What every session can be told; see `EngineSession`."""

    attach_timeout_s: float
    request_timeout_s: float
    retry_busy: bool
    agent_wait_s: float


class EngineSession:
    """A session with the agent at ``attach_path``; open within ``async with``.

    Entering raises `PeerLost` when no agent listens there within ``attach_timeout_s``,
    `RequestRefused` when it says no, and `ConfigError` when it is another user's, or another user
    could take its place. A request is answered within ``request_timeout_s``, or raises
    `RequestTimeout`. Offers and fetches that the agent has no room for are asked for again until
    their deadline, unless ``retry_busy`` is False. ``lost`` is why the session ended, None while it
    lives.

    Where a `KeptSession` keeps it, offers and fetches that its agent refuses as it drains, or that
    come when it has ended, wait for the next session, for ``agent_wait_s``.
    """

    serves: AgentRole | None = None
    """The kind of agent that this session is for; None for either."""

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        attach_timeout_s: float = 0.0,
        request_timeout_s: float = 30.0,
        retry_busy: bool = True,
        agent_wait_s: float = 10.0,
    ) -> None:
        self.engine, self.retry_busy, self.agent_wait_s = engine, retry_busy, agent_wait_s
        self.attach_timeout_s = attach_timeout_s
        self.boot = new_boot_id()
        self.request_timeout_s = request_timeout_s
        self._attach = AttachClient(attach_path)
        self._exit = contextlib.AsyncExitStack()
        self._client: RequestClient | None = None
        self._welcome: Welcome | None = None
        self.lost: KVBusError | None = None
        self._ended = anyio.Event()
        self.is_kept = False
        """Whether another session follows once this one has ended: its keeper says so."""
        self.is_left = False
        """Whether the agent has said that it ends: what it did not answer was not begun."""
        self._next: Self | None = None
        self._waiting: dict[Callable[[Self | None], None], asyncio.TimerHandle] = {}

    @cached_property
    def runner(self) -> Runner:
        """Its event loop. A `Link` sets its own."""
        return Runner(running_loop())

    @property
    def agent(self) -> Welcome:
        """What the agent said of itself; raises `ClosedError` before the session is open."""
        if self._welcome is None:
            raise ClosedError("the session is not open")
        return self._welcome

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await self._connect(stack)
            self._welcome = await self._greet()
            context = stack.enter_context(new_context())
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            self._client = RequestClient(
                context,
                self._welcome.engine_endpoint,
                boot=self.boot,
                on_notice=self._take_notice,
                max_pending=MAX_PENDING,
            )
            tasks.start_soon(self._client.run)
            tasks.start_soon(self._watch)
            tasks.start_soon(self._watch_silence, self._client)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._say_goodbye()
        self._lose(ClosedError("the session was closed"))
        await self._exit.aclose()

    async def ready(self) -> None:
        """Return when the engine's home has the control session and every rank.

        Those that the control session said are elsewhere are not waited for. A session with
        another agent than the home gets no answer: `RequestTimeout`.
        """
        await self.request(AwaitReady())

    async def ended(self) -> KVBusError:
        """Why the session ended, once it has: the agent is gone, or it was closed from here."""
        await self._ended.wait()
        return self.lost or ClosedError("the session was closed")

    def when_followed(self, call: Callable[[Self | None], None]) -> None:
        """Have ``call`` called with the session that follows this one.

        With None when there is none within ``agent_wait_s``, or none is going to be.
        """
        if self._next is not None or not self.is_kept:
            call(self._next)
            return
        loop = asyncio.get_running_loop()
        self._waiting[call] = loop.call_later(self.agent_wait_s, self._stop_waiting, call)

    def follow_with(self, session: Self | None) -> None:
        """Called by the keeper: ``session`` follows, and can be used; None when none ever will."""
        self._next, self.is_kept = session, session is not None
        for call in list(self._waiting):
            self._stop_waiting(call)

    def _stop_waiting(self, call: Callable[[Self | None], None]) -> None:
        timer = self._waiting.pop(call, None)
        if timer is not None:
            timer.cancel()
            call(self._next)

    def may_be_asked_next(self, error: KVBusError) -> bool:
        """Whether what failed with ``error`` may be asked of the session that follows.

        The agent did not begin it, or has ended, and so has what it began.
        """
        is_refused = isinstance(error, RequestRefused) and error.code in NOT_BEGUN
        return self.is_kept and (is_refused or self.lost is not None)

    async def resume(self, before: Self) -> None:
        """Register with this agent what ``before`` had with the one that is gone."""

    async def request(self, message: Request[R], *, timeout_s: float = 0.0) -> R:
        """Send a request and return its typed reply.

        Raises `RequestRefused`, `RequestTimeout`, and `PeerLost` when the agent goes.
        """
        return await self.request_as(message, lambda reply: reply, timeout_s=timeout_s)

    async def request_as(
        self, message: Request[R], read: Callable[[R], T], *, timeout_s: float = 0.0
    ) -> T:
        """As `request`; returns what ``read`` makes of the reply.

        ``read`` is called before any notice that the agent sent after the reply, and also when the
        caller was cancelled by then.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(outcome: R | KVBusError) -> None:
            if not isinstance(outcome, KVBusError):
                result = read(outcome)
                if not future.done():
                    future.set_result(result)
            elif not future.done():
                is_end = isinstance(outcome, ClosedError | PeerLost)
                future.set_exception(self.lost or outcome if is_end else outcome)

        self.send(message, settle, timeout_s=timeout_s)
        return await future

    def send(
        self,
        message: Request[R],
        on_reply: Callable[[R | KVBusError], None],
        *,
        timeout_s: float = 0.0,
    ) -> None:
        """Send a request; ``on_reply`` gets its typed reply, or the error that stands for it.

        With ``timeout_s`` infinite it is waited for while the session lives. ``on_reply`` is
        called before any notice that the agent sent after the reply; that the session has ended,
        `lost` says better. Raises `ClosedError` before it is open, and why it ended after.
        """
        if self.lost is not None:
            raise self.lost
        if self._client is None:
            raise ClosedError("the session is not open")
        timeout_s = timeout_s or self.request_timeout_s
        self._client.send(message, timeout_s=timeout_s, on_reply=on_reply)

    def _take_notice(self, notice: Notice) -> None:
        if notice.op == Leaving.op:
            self.is_left = True
        else:
            self._on_notice(notice)

    def _on_notice(self, notice: Notice) -> None:
        """A notice of the agent, for sessions that get them."""

    def _on_silence(self, silent_s: float) -> None:
        """Told each second for how long the agent has answered nothing; it is asked meanwhile."""

    def _ends_within_s(self) -> float:
        """For how long the end of an agent that hung up is waited for."""
        return ENDS_WITHIN_S

    def _on_lost(self, error: KVBusError) -> None:
        """The session has ended; what waits must not wait any longer."""

    async def _connect(self, stack: contextlib.AsyncExitStack) -> None:
        """Attach; while no agent listens, try again until the deadline."""
        deadline = anyio.current_time() + self.attach_timeout_s
        while True:
            try:
                await stack.enter_async_context(self._attach)
            except PeerLost:
                if anyio.current_time() >= deadline:
                    raise
                await anyio.sleep(ATTACH_RETRY_S)
            else:
                return

    async def _greet(self) -> Welcome:
        hello = Hello(
            min_protocol=PROTOCOL_VERSION,
            max_protocol=PROTOCOL_VERSION,
            engine_id=self.engine.engine_id,
            boot=self.boot,
        )
        welcome = await self._call(hello)
        if self.serves not in (None, welcome.role):
            raise LocalError(
                f"the agent at {self._attach.path} is for {welcome.role} engines, not {self.serves}"
            )
        if welcome.engine_endpoint.startswith(IPC):
            check_folder(Path(welcome.engine_endpoint.removeprefix(IPC)).parent)
        return welcome

    async def _call(self, message: Request[R], fds: tuple[int, ...] = ()) -> R:
        body = await self._attach.call({"op": message.op, "body": to_body(message)}, fds)
        reply: R = from_body(message.reply, body)
        return reply

    async def _watch(self) -> None:
        """What is begun while the agent's end is waited for makes it wait longer."""
        await self._attach.closed.wait()
        waited_s = 0.0
        while (more_s := self._ends_within_s() - waited_s) > 0:
            waited_s += more_s
            if await self._attach.process_ended(more_s):
                self._lose(PeerLost(f"the agent at {self._attach.path} is gone"))
                return
        self._lose(AgentHungUp(f"the agent at {self._attach.path} hung up, and lives on"))

    async def _watch_silence(self, client: RequestClient) -> None:
        while self.lost is None:
            await anyio.sleep(LOOK_S)
            self._on_silence(client.silent_s)

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(KVBusError), anyio.move_on_after(GOODBYE_S, shield=True):
            await self.request(Detach(), timeout_s=GOODBYE_S)

    def _lose(self, error: KVBusError) -> None:
        if self.lost is not None:
            return
        if self._client is not None and isinstance(error, PeerLost):
            self._client.take_last()  # what it said before its end
        self.lost = error
        if self._client is not None:
            self._client.close()
        self._on_lost(error)
        self._ended.set()


async def greet(attach: Path) -> Welcome:
    """Who listens at ``attach``, and where its other sockets are.

    Raises `PeerLost` or `RequestRefused` (``busy``) while it is not ready.
    """
    hello = Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, engine_id="greeting", boot=new_boot_id())
    async with AttachClient(attach) as client:
        return from_body(Welcome, await client.call({"op": hello.op, "body": to_body(hello)}))
