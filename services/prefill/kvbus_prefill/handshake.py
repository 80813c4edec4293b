"""Answers decode agents that introduce one of their engines to one of ours.

Refuses engines whose KV the other cannot use, with the field and both values.
"""

import asyncio

import structlog

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.process.guard import guarded
from kvbus.agent.process.identity import check_protocol
from kvbus.agent.process.service import Agent
from kvbus.bus import Call
from kvbus.planning import check_compatible
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.peer import Handshake, HandshakeDone
from kvbus_prefill.config import PrefillConfig

log = structlog.get_logger()


async def answer_handshake(
    agent: Agent, config: PrefillConfig, handshake: Handshake, call: Call
) -> None:
    """Reply with the engine's memory, or refuse."""

    async def answer() -> None:
        done = await _shake_hands(agent, config, handshake)
        log.info(
            "handshake.done",
            peer=handshake.agent_id,
            engine_id=handshake.engine_id,
            reader=handshake.reader.engine.engine_id,
        )
        call.reply(done)

    await guarded(answer, call.refuse)


async def _shake_hands(agent: Agent, config: PrefillConfig, handshake: Handshake) -> HandshakeDone:
    check_protocol(handshake.min_protocol, handshake.max_protocol)
    engine, memory_id = _engine(agent, handshake)
    memory = engine.memory()
    check_compatible(memory.engine, handshake.reader.engine)
    metadata = await _metadata(agent, engine)
    agent.data_plane.end_if_exposed()
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
        others=engine.others,
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


def _engine(agent: Agent, handshake: Handshake) -> tuple[LocalEngine, str]:
    """The engine, or those of its ranks that are here, and what its memory is known by."""
    engines = agent.engines
    if handshake.engine_instance:
        engine = engines.engine(handshake.engine_id, instance=handshake.engine_instance)
    else:
        engine = engines.part(handshake.engine_id, handshake.ranks)
    return engine, engine.memory_id
