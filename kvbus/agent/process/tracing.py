"""The answer to `Trace`: what a service remembers, with the times of this process."""

import asyncio
import time

from kvbus.agent.process.identity import AgentIdentity
from kvbus.agent.process.service import Service
from kvbus.protocol.trace import MAX_OTHERS, Trace, Traced


def traced(identity: AgentIdentity, service: Service, asked: Trace) -> Traced:
    """Called in the agent's event loop, whose clock is that of all spans."""
    remembered = service.spans(asked)
    spans, cut = remembered.newest()
    return Traced(
        agent_id=identity.agent_id,
        role=identity.role,
        boot=identity.boot,
        now_s=asyncio.get_running_loop().time(),
        wall_s=time.time(),
        spans=spans,
        cut=cut,
        others=remembered.others[-MAX_OTHERS:],
    )
