"""Handshakes: check a decode agent's right to an engine, and reply with how to read from it."""

from collections.abc import Sequence
from functools import partial

import anyio
import structlog

from kvbus.agent.identity import check_protocol
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.loop import guarded
from kvbus.agent.service import Agent
from kvbus.bus import Call
from kvbus.data import messages as wire
from kvbus.errors import ErrorCode, LocalError, TransferFailed
from kvbus.planning import check_compatible
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.message import check_right
from kvbus.protocol.peer import Handshake, HandshakeDone
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.lending import MemoryLender
from kvbus_prefill.offer.table import OfferTable

log = structlog.get_logger()

CONNECTS_WITHIN_S = 10.0
HANDSHAKE_WITHIN_S = 4.0
"""Time that a handshake waits for a data process to restart."""


class Handshakes:
    def __init__(
        self, agent: Agent, config: PrefillConfig, table: OfferTable, lender: MemoryLender
    ) -> None:
        self._agent, self._config, self._table, self._lender = agent, config, table, lender

    def answer(self, handshake: Handshake, call: Call) -> None:
        answer = partial(self._answer, handshake, call)
        self._agent.tasks.start_soon(guarded, answer, call.refuse)

    async def _answer(self, handshake: Handshake, call: Call) -> None:
        agent = self._agent
        check_protocol(handshake.min_protocol, handshake.max_protocol)
        engine = self._engine_for(handshake)  # refuses without detail
        engine.check_memory()
        memory, memory_id = engine.memory(), engine.memory_id
        check_compatible(memory.engine, handshake.reader)
        socket, metadata = self._lender.socket_for(engine), tuple[bytes, ...]()
        maps = not socket.closed and "" != handshake.machine == socket.machine
        backend, slot_memory = wire.UCX, tuple[wire.MemoryKind, ...]()
        if not maps:
            backend = _shared_backend(handshake, agent.data.backends, agent.identity.agent_id)
            metadata = await self._metadata(engine, backend)
            self._drive_connection(backend)
            memory, slot_memory = engine.memory(), agent.staging.kinds_of(engine.devices)
        log.info(
            "handshake.done",
            peer=handshake.agent_id,
            engine_id=handshake.engine_id,
            reader=handshake.reader.engine_id,
        )
        call.reply(
            HandshakeDone(
                protocol=PROTOCOL_VERSION,
                agent_id=agent.identity.agent_id,
                memory=memory,
                memory_id=memory_id,
                nixl_agent=agent.data.nixl_name,
                nixl_metadata=metadata,
                events_endpoint=agent.identity.events_endpoint,
                max_lease_s=self._config.max_lease_s,
                slot_bytes=agent.staging.slot_bytes,
                rank_secret=engine.rank_secret,
                remote_ranks=engine.remote_ranks,
                memory_socket=socket,
                grant=self._lender.grant_for(call.session.key),
                nixl_backend=backend,
                slot_memory=slot_memory,
            )
        )

    # UCX connects without this process. LIBFABRIC blocks the reader's data process until this one
    # accepts the connection, which takes calls of NIXL here.
    def _drive_connection(self, backend: str) -> None:
        if backend != wire.UCX:
            progress = self._agent.data.drive_progress()
            self._agent.loop.call_later(CONNECTS_WITHIN_S, progress.close)

    async def _metadata(self, engine: LocalEngine, backend: str) -> tuple[bytes, ...]:
        """Return NIXL metadata of the data process that runs when this returns."""
        data = self._agent.data
        while True:
            with anyio.move_on_after(HANDSHAKE_WITHIN_S) as within:
                await data.until_running()
            if within.cancelled_caught:
                problem = f"the data process is not running: {data.problem}"
                raise LocalError(problem, code=ErrorCode.BUSY)
            boot = data.boot
            try:
                await self._agent.data_plane.open()
                blobs = await self._blobs(engine, backend)
            except TransferFailed:
                if data.boot == boot:
                    raise
            else:
                if data.boot == boot:
                    return blobs

    async def _blobs(self, engine: LocalEngine, backend: str) -> tuple[bytes, ...]:
        agent = self._agent
        direct = [rank for rank in engine.ranks.values() if rank.direct]
        slots = agent.staging.of(engine.devices)
        for defined in (*(rank.defined for rank in direct), *(one.defined for one in slots)):
            await agent.data.result(defined)
        wanted = wire.Metadata(
            memories=tuple(rank.number for rank in direct),
            devices=tuple(one.device for one in slots),
            backend=backend,
        )
        reply = await agent.data.call(wanted)
        await agent.data_plane.end_if_exposed()
        return reply.result.blobs if isinstance(reply.result, wire.MetadataBlobs) else ()

    # The reader has a ticket of the engine, or may shake hands ahead of it. An agent that has only
    # ranks of the engine knows no tickets. Its readers show the secret that the engine's home hands
    # out. Nothing is disclosed or searched before these checks.
    def _engine_for(self, handshake: Handshake) -> LocalEngine:
        engines, wanted = self._agent.engines, handshake.engine_id
        if handshake.ranks:
            return engines.part(wanted, handshake.ranks, rank_secret=handshake.rank_secret)
        if not handshake.offer_id and handshake.secret is None:
            self._check_ahead()
            return engines.engine(wanted, instance=handshake.engine_instance)
        if self._table.find(handshake.offer_id) is None:
            engines.check_published(wanted, handshake.engine_instance)
        offer = self._table.check_reader(handshake.offer_id, handshake.secret)
        if offer.pooled is not None:
            offer.check_engine(wanted)
        engine = engines.engine(wanted, instance=handshake.engine_instance)
        check_right(wanted, offer.memory_engine_id)
        return engine

    def _check_ahead(self) -> None:
        allowed = self._config.shake_hands_ahead  # with keys, a reader has one of role `decode`
        if allowed == "nobody" or (allowed == "keys" and self._agent.access.keys is None):
            raise LocalError(
                "this agent shakes hands with those who have a ticket only (shake_hands_ahead = "
                f"'{allowed}'{', and it has no keys' if allowed == 'keys' else ''}); the first "
                "request does it then",
                code=ErrorCode.FORBIDDEN,
            )


def _shared_backend(handshake: Handshake, ours: Sequence[str], agent_id: str) -> str:
    """Return the first backend of the reader that is among ``ours``."""
    shared = [name for name in handshake.nixl_backends if name in ours]
    if not shared:
        wanted, here = ", ".join(handshake.nixl_backends), ", ".join(ours)
        raise LocalError(
            f"no common NIXL backend: the decode agent '{handshake.agent_id}' has {wanted}, the "
            f"prefill agent '{agent_id}' has {here}; give both one in nixl_backends",
            code=ErrorCode.INCOMPATIBLE,
            field="nixl_backends",
            prefill=here,
            decode=wanted,
        )
    return shared[0]
