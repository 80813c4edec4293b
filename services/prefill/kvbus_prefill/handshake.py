"""Answers decode agents that introduce one of their engines to one that is here."""

import asyncio
from functools import partial

import structlog

from kvbus.agent.engine import LocalEngine
from kvbus.agent.identity import check_protocol
from kvbus.agent.loop import guarded
from kvbus.agent.service import Agent
from kvbus.bus import Call
from kvbus.errors import ErrorCode, LocalError
from kvbus.planning import check_compatible
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.message import check_right
from kvbus.protocol.peer import Handshake, HandshakeDone
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.lending import MemoryLender
from kvbus_prefill.offer.table import OfferTable

log = structlog.get_logger()


class Handshakes:
    """The handshakes of a prefill agent.

    A reader without a right to the engine is refused without detail, one whose engine cannot use
    the KV with the field and both values.
    """

    def __init__(
        self, agent: Agent, config: PrefillConfig, offers: OfferTable, lender: MemoryLender
    ) -> None:
        self._agent, self._config = agent, config
        self._offers, self._lender = offers, lender

    def answer(self, handshake: Handshake, call: Call) -> None:
        """Reply with the engine's memory, or refuse, in a task of its own."""
        self._agent.tasks.start_soon(guarded, partial(self._answer, handshake, call), call.refuse)

    async def _answer(self, handshake: Handshake, call: Call) -> None:
        agent = self._agent
        check_protocol(handshake.min_protocol, handshake.max_protocol)
        engine = self._engine(handshake)
        memory, memory_id = engine.memory(), engine.memory_id
        check_compatible(memory.engine, handshake.reader.engine)
        socket, metadata = self._lender.socket_for(engine), tuple[bytes, ...]()
        maps = socket and not socket.closed and "" != handshake.machine == socket.machine
        if not maps:
            await agent.data_plane.open()
            metadata = await self._metadata(engine)
            await agent.data_plane.end_if_exposed()
        log.info(
            "handshake.done",
            peer=handshake.agent_id,
            engine_id=handshake.engine_id,
            reader=handshake.reader.engine.engine_id,
        )
        call.reply(
            HandshakeDone(
                protocol=PROTOCOL_VERSION,
                agent_id=agent.identity.agent_id,
                memory=memory,
                memory_id=memory_id,
                nixl_agent=agent.transport.name,
                nixl_metadata=metadata,
                events_endpoint=agent.identity.events_endpoint,
                max_lease_s=self._config.max_lease_s,
                slot_bytes=agent.staging.slot_bytes,
                access=engine.access,
                others=engine.others,
                memory_socket=socket,
                digests=True,
            )
        )

    async def _metadata(self, engine: LocalEngine) -> tuple[bytes, ...]:
        """What NIXL needs to read the engine, or slots for it: a blob for each kind of memory."""
        staging, transport = self._agent.staging, self._agent.transport
        registrations = [*engine.registrations, *staging.registrations(engine.devices)]
        kinds = sorted({registration.memory for registration in registrations})
        futures = [
            transport.metadata([one for one in registrations if one.memory == kind])
            for kind in kinds
        ]
        return tuple([await asyncio.wrap_future(future) for future in futures])

    # The reader holds a ticket of the engine, or is one of those who may ask ahead of it; an agent
    # that has only ranks of it knows no tickets, and is shown what the engine's home hands out for
    # it. Nothing is told, and nothing looked up, before.
    def _engine(self, handshake: Handshake) -> LocalEngine:
        """The engine of the ticket, or those of its ranks that are here; raises `LocalError`."""
        engines, wanted = self._agent.engines, handshake.engine_id
        if handshake.ranks:
            return engines.part(wanted, handshake.ranks, access=handshake.access)
        if not handshake.offer_id and handshake.secret is None:
            self._check_ahead()
            return engines.engine(wanted, instance=handshake.engine_instance)
        offer = self._offers.check_reader(handshake.offer_id, handshake.secret)
        engine = engines.engine(wanted, instance=handshake.engine_instance)
        check_right(wanted, offer.engine_id)
        return engine

    def _check_ahead(self) -> None:
        """Raise `LocalError` (``forbidden``) unless readers may ask without a ticket.

        With keys, only those whose key is trusted as ``decode`` may shake hands at all.
        """
        allowed = self._config.shake_hands_ahead
        if allowed == "nobody" or (allowed == "keys" and self._agent.access.keys is None):
            raise LocalError(
                "this agent shakes hands with those who have a ticket only (shake_hands_ahead = "
                f"'{allowed}'{', and it has no keys' if allowed == 'keys' else ''}); the first "
                "request does it then",
                code=ErrorCode.FORBIDDEN,
            )
