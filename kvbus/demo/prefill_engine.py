"""The demo's prefill engine, a process: computes prompts and offers their KV.

Refuses to know how an offer comes about: that depends on where the cache is.
"""

from kvbus.demo.engine import attached_engine
from kvbus.demo.host_requests import HostRequests
from kvbus.demo.prefill_requests import PrefillRequests
from kvbus.demo.request_blocks import most_prefill_blocks
from kvbus.demo.serving import run_engine, serve
from kvbus.demo.work import EngineSetup, Prefill
from kvbus.engine import PrefillSession
from kvbus.engine.bounce import HostPrefill


async def main(setup: EngineSetup) -> None:
    """Attach, and serve until the driver closes the pipe."""
    async with attached_engine(setup, PrefillSession, most_prefill_blocks) as (engine, session):
        requests: PrefillRequests | HostRequests = PrefillRequests(engine, session)
        if engine.ring is not None and engine.copier is not None:
            requests = HostRequests(engine, HostPrefill(session, engine.ring, engine.copier))
        await serve(engine, session.agent.peer_endpoint, {Prefill: requests.handle})


if __name__ == "__main__":
    run_engine(main)
