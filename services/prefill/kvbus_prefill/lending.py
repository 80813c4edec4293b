"""Lending of engine memory to decode agents of this machine and user.

Host memory is lent read-only. CUDA cannot do this for GPU memory.
"""

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any

import structlog
from msgspec import structs

from kvbus.agent.config import MEMORY_SOCKET
from kvbus.agent.identity import machine_id, sharing
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.observe import Refusals
from kvbus.agent.segments import Passed
from kvbus.agent.service import Agent
from kvbus.errors import ConfigError, ErrorCode, LocalError, ProtocolError
from kvbus.memory.attach import AttachConnection, AttachServer, PassingAnswer
from kvbus.memory.mapping import PassedFile
from kvbus.protocol.attach import (
    MAX_LENT_AT_ONCE,
    LendMemory,
    LentCuda,
    LentSegment,
    MemoryLent,
    MemorySocket,
)
from kvbus.protocol.message import Role, check_right, from_body, to_body
from kvbus.protocol.tools import Sharing
from kvbus_prefill.config import PrefillConfig

log = structlog.get_logger()

MAX_CONNECTIONS = 256
MAX_PROCESS_CONNECTIONS = 192
"""A process has a connection for each engine that it reads."""


# A grant ties a connection to the key of the handshake. It is the key, and a hash of it that only
# this agent can compute. Revoking a key closes its connections, and thus the memory at its agent. A
# hostile reader could keep its maps and swap in the page of cells:
#
#     cells      live ──────────┤ closed: earlier commits complete, later ones are requests
#     revoked                   ├─ hang up
#     offers     with cells     ├─ without cells, while the engine lives
class MemoryLender:
    """Memory socket; ``on_revoked`` gets engines with cells that a revoked reader can write."""

    def __init__(
        self,
        agent: Agent,
        config: PrefillConfig,
        on_revoked: Callable[[LocalEngine], None] = lambda _: None,
    ) -> None:
        self._agent, self._config, self._on_revoked = agent, config, on_revoked
        self._readers: dict[AttachConnection, tuple[LocalEngine, str]] = {}
        self._have_cells: defaultdict[LocalEngine, set[str]] = defaultdict(set)
        """Keys of readers that have the engine's page of cells."""
        self._secret = secrets.token_bytes(32)
        agent.access.on_change.append(self._shut_down_revoked)
        self._closed = "closed by the prefill agent's config (mapped = false)"
        self._server = AttachServer(
            agent.folder / MEMORY_SOCKET,
            self._lend,
            lambda connection: self._readers.pop(connection, None),
            on_refusal=Refusals(agent.metrics).of_attach,
            max_connections=MAX_CONNECTIONS,
            max_process_connections=MAX_PROCESS_CONNECTIONS,
        )

    async def open(self) -> None:
        """Listen, unless disabled. If that fails, handshakes report why."""
        if not self._config.mapped:
            return
        try:
            await self._agent.tasks.start(self._server.serve)
        except ConfigError as error:
            self._closed = error.message
            log.warning("lending.closed", reason=error.message)
        else:
            self._closed = ""

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def socket_for(self, engine: LocalEngine) -> MemorySocket:
        closed, passed = self._closed, [one for *_, one in _segments(engine)]
        files = [one for one in passed if isinstance(one, PassedFile)]
        if not closed and not all(one.is_lendable for one in files):
            closed = "the prefill agent cannot open the engine's memory for reading only"
        path = "" if closed else str(self._server.path)
        return MemorySocket(path=path, machine=machine_id(), closed=closed)

    def sharing(self) -> Sharing:
        return sharing(path="" if self._closed else str(self._server.path), closed=self._closed)

    def end_engine(self, engine: LocalEngine) -> None:
        self._have_cells.pop(engine, None)
        for connection, (lent, _) in self._readers.items():
            if lent is engine:
                connection.shut_down()

    def grant_for(self, key: str) -> str:
        if self._agent.access.keys is None:
            return ""
        return f"{blake2b(key.encode(), key=self._secret, digest_size=16).hexdigest()} {key}"

    def _check_grant(self, grant: str) -> str:
        """Return the grant's key."""
        key = grant.partition(" ")[2]
        check_right(grant, self.grant_for(key))
        if not self._may_read(key):
            raise LocalError("the key is not trusted any more", code=ErrorCode.FORBIDDEN)
        return key

    def _may_read(self, key: str) -> bool:
        access = self._agent.access
        return access.keys is None or Role.DECODE in access.roles_of(key)

    def _shut_down_revoked(self, keys: frozenset[str]) -> None:
        revoked = {key for key in keys if not self._may_read(key)}
        for connection, (_, key) in self._readers.items():
            if key in revoked:
                connection.shut_down()
        for engine, readers in self._have_cells.items():
            if engine.shares_cells and not revoked.isdisjoint(readers):
                engine.shares_cells = False
                log.warning("cells.closed", engine_id=engine.engine_id)
                self._on_revoked(engine)

    async def _lend(
        self, connection: AttachConnection, message: dict[str, Any], _: list[int]
    ) -> PassingAnswer:
        op, body = message.get("op"), message.get("body")
        if op != LendMemory.op or not isinstance(body, dict):
            raise ProtocolError(
                f"a message here is '{LendMemory.op}' with a map 'body'", code=ErrorCode.UNKNOWN_OP
            )
        wanted = from_body(LendMemory, body)
        engine, key = self._engine(wanted), self._check_grant(wanted.grant)
        if self._readers.setdefault(connection, (engine, key)) != (engine, key):
            raise LocalError("this connection is for another engine", code=ErrorCode.STALE)
        if wanted.cells:
            cells = engine.cells
            openers = [cells.reopen] if cells is not None else []
            if cells is not None:
                self._have_cells[engine].add(key)
            answer = MemoryLent(self._agent.identity.agent_boot, ())
            return PassingAnswer(to_body(answer), _opened(openers))
        lent = [one for segment in _segments(engine) for one in _entries(*segment)]
        some = lent[wanted.first : wanted.first + MAX_LENT_AT_ONCE]
        answer = MemoryLent(self._agent.identity.agent_boot, tuple(one for one, _ in some))
        openers = [opener for _, opener in some if opener is not None]
        return PassingAnswer(to_body(answer), _opened(openers))

    def _engine(self, wanted: LendMemory) -> LocalEngine:
        if wanted.agent_boot != self._agent.identity.agent_boot:
            raise LocalError("another process of the agent is here", code=ErrorCode.STALE)
        engine = self._agent.engines.part(wanted.engine_id, (), rank_secret=wanted.rank_secret)
        if engine.memory_id != wanted.memory_id:
            raise LocalError("the engine registered again with other memory", code=ErrorCode.STALE)
        if closed := self.socket_for(engine).closed:
            raise LocalError(f"the memory is not lent: {closed}", code=ErrorCode.CONFIG)
        return engine


def _segments(engine: LocalEngine) -> Iterator[tuple[int, str, Passed]]:
    for memory in engine.ranks.values():
        for segment in memory.rank.segments:
            yield memory.rank.rank, segment.segment_id, memory.segments.passed[segment.segment_id]


def _entries(
    rank: int, name: str, passed: Passed
) -> Iterator[tuple[LentSegment, Callable[[], int] | None]]:
    """Yield entries of a reply, and what opens the descriptor of each."""
    if isinstance(passed, PassedFile):
        yield LentSegment(rank, name, passed.size_bytes), passed.reopen
        return
    source = passed.source
    cuda = LentCuda(source.device, source.offset_bytes, source.handle)
    segment = LentSegment(rank, name, passed.size_bytes, cuda)
    if source.handle:
        yield segment, None
    for part_bytes, fd in zip(source.parts, passed.fds, strict=True):
        part = structs.replace(cuda, part_bytes=part_bytes)
        yield structs.replace(segment, cuda=part), partial(os.dup, fd)


# A reply may wait for its reader while the engine ends. Then the engine's descriptors are closed,
# and other files may get their numbers. So each reply opens its own.
def _opened(openers: Iterable[Callable[[], int]]) -> list[int]:
    fds: list[int] = []
    try:
        for opener in openers:
            fds.append(opener())
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if not isinstance(error, OSError):
            raise
        raise LocalError(f"cannot lend: {error.strerror}", code=ErrorCode.BUSY) from error
    return fds
