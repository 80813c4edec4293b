"""One request to the peer socket of an agent, from a router or a tool that asks seldom."""

import anyio

from kvbus.bus.boot import new_boot_id
from kvbus.bus.client import RequestClient
from kvbus.bus.sockets import new_context
from kvbus.errors import KVBusError
from kvbus.protocol.message import R, Request


async def ask_agent(endpoint: str, message: Request[R], *, timeout_s: float) -> R:
    """The typed reply of the agent at ``endpoint``.

    Raises `RequestRefused`, `RequestTimeout`, and `ConfigError` for an endpoint that is none.
    """
    outcome: R | KVBusError
    with new_context() as context:
        client = RequestClient(context, endpoint, boot=new_boot_id())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            try:
                outcome = await client.ask(message, timeout_s=timeout_s)
            except KVBusError as error:
                outcome = error
            tasks.cancel_scope.cancel()
    if isinstance(outcome, KVBusError):
        raise outcome
    return outcome
