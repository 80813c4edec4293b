"""Connections of an engine process with its agent."""

import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import anyio

from kvbus.bus import RequestClient, new_boot_id, new_context
from kvbus.errors import (
    AgentHungUp,
    ClosedError,
    ErrorCode,
    KVBusError,
    LocalError,
    PeerLost,
    RequestRefused,
)
from kvbus.memory.attach import AgentLife, AttachClient, close_fds
from kvbus.memory.attach.socket_paths import check_folder
from kvbus.protocol.attach import Hello, Welcome
from kvbus.protocol.engine import AgentRole, Detach
from kvbus.protocol.envelope import PROTOCOL_VERSION, Notice
from kvbus.protocol.message import R, Request, from_body, to_body

GOODBYE_S = 1.0
ATTACH_RETRY_S = 0.05
CHECK_S = 1.0
ENDS_WITHIN_S = 1.0
"""A process that exits closes its connections first."""
IPC = "ipc://"
RETRY_S = 0.05
MAX_RETRY_S = 2.0
MAX_ABSENT_RETRY_S = 0.2
MAX_PENDING = 1 << 20
"""The largest `max_handoffs` of an agent."""


class Events:
    def on_notice(self, notice: Notice) -> None:
        """Handle a notice of the agent."""

    def on_silence(self, silent_s: float) -> None:
        """Called each second with the time since the agent's last message."""

    def on_lost(self, error: KVBusError) -> None:
        """Fail what is pending."""


class Connection:
    """A connection with the agent at ``attach_path``; open within ``async with``.

    Entering raises `PeerLost` without a ready agent within ``attach_timeout_s``; `RequestRefused`;
    `LocalError` for another role; and `ConfigError` if another user could replace the agent.
    """

    def __init__(
        self,
        attach_path: str | Path,
        engine_id: str,
        *,
        role: AgentRole | None = None,
        attach_timeout_s: float = 0.0,
        request_timeout_s: float = 30.0,
    ) -> None:
        self.boot = ""
        self.events = Events()
        self.lost: KVBusError | None = None
        self.life = AgentLife()
        self._path, self._engine_id, self._role = attach_path, engine_id, role
        self._attach_timeout_s, self._request_timeout_s = attach_timeout_s, request_timeout_s
        self._attach = AttachClient(attach_path)
        self._exit = contextlib.AsyncExitStack()
        self._client: RequestClient | None = None
        self._welcome: Welcome | None = None
        self._ended = anyio.Event()

    @property
    def agent(self) -> Welcome:
        if self._welcome is None:
            raise ClosedError("the connection is not open")
        return self._welcome

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self._welcome = await self._attach_within_time(stack)
            context = stack.enter_context(new_context())
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            self._client = RequestClient(
                context,
                self._welcome.engine_endpoint,
                boot=self.boot,
                on_notice=lambda notice: self.events.on_notice(notice),  # noqa: PLW0108 - replaced
                max_pending=MAX_PENDING,
            )
            tasks.start_soon(self._client.run)
            tasks.start_soon(self._watch)
            tasks.start_soon(self._watch_silence, self._client)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        with contextlib.suppress(KVBusError), anyio.move_on_after(GOODBYE_S, shield=True):
            await self.request(Detach(), timeout_s=GOODBYE_S)
        self._lose(ClosedError("the session was closed"))
        await self._exit.aclose()

    async def ended(self) -> KVBusError:
        await self._ended.wait()
        return self.lost or ClosedError("the session was closed")

    async def pass_memory(self, message: Request[R], *fds: int) -> R:
        body = await self._attach.call({"op": message.op, "body": to_body(message)}, fds)
        reply: R = from_body(message.reply, body)
        return reply

    async def request(self, message: Request[R], *, timeout_s: float = 0.0) -> R:
        """Raise `RequestRefused`, `RequestTimeout` and `PeerLost`."""
        timeout_s = timeout_s or self._request_timeout_s
        return await self._open_client().request(message, timeout_s=timeout_s)

    def send(
        self,
        message: Request[R],
        on_reply: Callable[[R | KVBusError], None],
        *,
        timeout_s: float = 0.0,
    ) -> None:
        """Send a request; ``on_reply`` receives its reply or error, before later notices.

        An infinite ``timeout_s`` lasts as long as the connection.
        """
        timeout_s = timeout_s or self._request_timeout_s
        self._open_client().send(message, timeout_s=timeout_s, on_reply=on_reply)

    def _open_client(self) -> RequestClient:
        if self.lost is not None:
            raise self.lost.with_traceback(None)  # one error, raised often
        if self._client is None:
            raise ClosedError("the connection is not open")
        return self._client

    async def _attach_within_time(self, stack: contextlib.AsyncExitStack) -> Welcome:
        deadline = anyio.current_time() + self._attach_timeout_s
        while True:
            self.boot, self._attach = new_boot_id(), AttachClient(self._path)
            try:
                async with contextlib.AsyncExitStack() as attempt:
                    attempt.callback(self._release_life)
                    await attempt.enter_async_context(self._attach)
                    welcome = await self._greet()
                    stack.push_async_callback(attempt.pop_all().aclose)
                    return welcome
            except (PeerLost, RequestRefused) as error:
                is_final = isinstance(error, RequestRefused) and error.code is not ErrorCode.BUSY
                if is_final or anyio.current_time() >= deadline:
                    raise
            await anyio.sleep(ATTACH_RETRY_S)

    def _release_life(self) -> None:
        self.life.release()  # frees the last one, as each attempt has its own

    async def _greet(self) -> Welcome:
        hello = Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, self._engine_id, self.boot)
        body = {"op": hello.op, "body": to_body(hello)}
        answer, fds = await self._attach.call_for_fds(body)
        self.life.close()
        self.life = AgentLife(fds.pop() if fds else None)
        close_fds(fds)
        welcome = from_body(Welcome, answer)
        if self._role not in (None, welcome.role):
            raise LocalError(
                f"the agent at {self._path} is for {welcome.role} engines, not {self._role}"
            )
        if welcome.engine_endpoint.startswith(IPC):
            check_folder(Path(welcome.engine_endpoint.removeprefix(IPC)).parent)
        return welcome

    async def _watch(self) -> None:
        await self._attach.closed.wait()
        if await self.life.ended(ENDS_WITHIN_S):
            self._lose(PeerLost(f"the agent at {self._path} is gone"))
        else:
            self._lose(AgentHungUp(f"the agent at {self._path} hung up, and lives on"))

    async def _watch_silence(self, client: RequestClient) -> None:
        while self.lost is None:
            await anyio.sleep(CHECK_S)
            self.events.on_silence(client.silent_s)

    def _lose(self, error: KVBusError) -> None:
        if self.lost is not None:
            return
        if self._client is not None and isinstance(error, PeerLost):
            self._client.take_last()  # messages that it sent before its end
        self.lost = error
        self._attach.shut_down()  # before a write to the blocks: see `EngineDirectory.end_if_left`
        if self._client is not None:
            self._client.closed_by = error
            self._client.close()
        self.events.on_lost(error)
        self._ended.set()


class ReconnectingConnection:
    """A connection that reopens after each loss, and then runs ``register`` again."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        register: Callable[[Connection], Awaitable[None]],
        *,
        name: str,
        on_open: Callable[[Connection], None] = lambda _: None,
        on_change: Callable[[], None],
        logger: logging.Logger,
    ) -> None:
        self._connect, self._register = connect, register
        self._name, self._logger = name, logger
        self._on_open, self._on_change = on_open, on_change
        self._latest: Connection | None = None
        self._problem: KVBusError | None = ClosedError(f"{name} is not open yet")
        self._last_failure = ""
        self.num_opened = 0

    @property
    def problem(self) -> KVBusError | None:
        return self._problem or self.latest.lost

    @property
    def has_failed(self) -> bool:
        return self.problem is not None and self._last_failure != ""

    @property
    def latest(self) -> Connection:
        """The last connection, perhaps lost. Raises `problem` before the first."""
        if self._latest is None:
            error = self._problem or ClosedError(f"{self._name} is not open yet")
            raise error.with_traceback(None)  # one error, raised often
        return self._latest

    async def run(self) -> None:
        retry_s = RETRY_S
        try:
            while True:
                num_before = self.num_opened
                await self._hold()
                if self.num_opened > num_before:
                    retry_s = RETRY_S
                # jitter: all engines of one agent lose it at the same moment
                await anyio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
                retry_s = min(2 * retry_s, self._max_retry_s())
        finally:
            self._problem = ClosedError(f"{self._name} was closed")

    async def _hold(self) -> None:
        try:
            async with self._connect() as connection:
                await self._register(connection)
                self._set(connection)
                self._fail(await connection.ended(), "lost")
        except KVBusError as error:
            self._fail(error, "cannot be opened")
        except Exception as error:  # a defect must not stop the keeper; the next connection is new
            self._fail(error, "failed")

    def _set(self, connection: Connection) -> None:
        self._latest, self._problem = connection, None
        self.num_opened += 1
        self._on_open(connection)
        self._last_failure = ""
        self._logger.info("kvbus: %s is open", self._name)
        self._on_change()

    def _fail(self, error: Exception, how: str) -> None:
        if isinstance(error, KVBusError):
            self._problem = error
        else:
            self._problem = LocalError(str(error), code=ErrorCode.INTERNAL)
            self._problem.__cause__ = error
        failure = f"{how}: {self._problem.message} [{self._problem.code}]"
        if failure != self._last_failure:
            message = "kvbus: %s %s; it is tried again"
            self._logger.warning(message, self._name, failure, exc_info=error is not self._problem)
        self._last_failure = failure
        self._on_change()

    def _max_retry_s(self) -> float:
        is_absent = isinstance(self._problem, PeerLost) and not isinstance(
            self._problem, AgentHungUp
        )
        return MAX_ABSENT_RETRY_S if is_absent else MAX_RETRY_S
