"""Answers decode agents that introduce one of their engines to one of ours.

Refuses who does not hold a ticket of the engine, without detail, and engines whose KV the other
cannot use, with the field and both values.
"""

import asyncio

import structlog

from kvbus.agent.engines import LocalEngine
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


async def answer_handshake(
    agent: Agent,
    config: PrefillConfig,
    offers: OfferTable,
    handshake: Handshake,
    call: Call,
    *,
    lender: MemoryLender,
) -> None:
    """Reply with the engine's memory, or refuse."""

    async def answer() -> None:
        done = await _shake_hands(agent, config, offers, handshake, lender)
        log.info(
            "handshake.done",
            peer=handshake.agent_id,
            engine_id=handshake.engine_id,
            reader=handshake.reader.engine.engine_id,
        )
        call.reply(done)

    await guarded(answer, call.refuse)


async def _shake_hands(
    agent: Agent,
    config: PrefillConfig,
    offers: OfferTable,
    handshake: Handshake,
    lender: MemoryLender,
) -> HandshakeDone:
    check_protocol(handshake.min_protocol, handshake.max_protocol)
    engine = _engine(agent, config, offers, handshake)
    memory, memory_id = engine.memory(), engine.memory_id
    check_compatible(memory.engine, handshake.reader.engine)
    socket, metadata = lender.socket_for(engine), tuple[bytes, ...]()
    maps = socket and not socket.closed and "" != handshake.machine == socket.machine
    if not maps:
        await agent.data_plane.open()
        metadata = await _metadata(agent, engine)
        await agent.data_plane.end_if_exposed()
    return HandshakeDone(
        protocol=PROTOCOL_VERSION,
        agent_id=agent.identity.agent_id,
        memory=memory,
        memory_id=memory_id,
        nixl_agent=agent.transport.name,
        nixl_metadata=metadata,
        events_endpoint=agent.identity.events_endpoint,
        max_lease_s=config.max_lease_s,
        slot_bytes=agent.staging.slot_bytes,
        access=engine.access,
        others=engine.others,
        memory_socket=socket,
        digests=True,
    )


async def _metadata(agent: Agent, engine: LocalEngine) -> tuple[bytes, ...]:
    """What NIXL needs to read the engine, or slots for it: a blob for each kind of memory."""
    registrations = [*engine.registrations, *agent.staging.registrations(engine.devices)]
    kinds = sorted({registration.memory for registration in registrations})
    futures = [
        agent.transport.metadata([one for one in registrations if one.memory == kind])
        for kind in kinds
    ]
    return tuple([await asyncio.wrap_future(future) for future in futures])


# Who asks holds a ticket of the engine, or is one of those who may ask ahead of it; an agent that
# has only ranks of it knows no tickets, and is shown what the engine's home hands out for it.
# Nothing is told, and nothing looked up, before.
def _engine(
    agent: Agent, config: PrefillConfig, offers: OfferTable, handshake: Handshake
) -> LocalEngine:
    """The engine of the ticket, or those of its ranks that are here; raises `LocalError`."""
    engines, wanted = agent.engines, handshake.engine_id
    if handshake.ranks:
        return engines.part(wanted, handshake.ranks, access=handshake.access)
    if not handshake.offer_id and handshake.secret is None:
        _check_ahead(agent, config)
        return engines.engine(wanted, instance=handshake.engine_instance)
    offered = offers.check_reader(handshake.offer_id, handshake.secret)
    engine = engines.engine(wanted, instance=handshake.engine_instance)
    check_right(wanted, offered.engine_id)
    return engine


def _check_ahead(agent: Agent, config: PrefillConfig) -> None:
    """Raise `LocalError` (``forbidden``) unless who asks may do so without a ticket.

    With keys, the peer socket lets nobody shake hands whose key is not trusted as ``decode``.
    """
    allowed = config.shake_hands_ahead
    if allowed == "nobody" or (allowed == "keys" and agent.access.keys is None):
        raise LocalError(
            "this agent shakes hands with those who have a ticket only (shake_hands_ahead = "
            f"'{allowed}'{', and it has no keys' if allowed == 'keys' else ''}); the first request "
            "does it then",
            code=ErrorCode.FORBIDDEN,
        )
