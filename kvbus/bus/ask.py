"""Requests to the peer socket of an agent, from a router or a tool that asks seldom."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from kvbus.bus.boot import new_boot_id
from kvbus.bus.client import RequestClient
from kvbus.bus.curve import ClientCurve
from kvbus.bus.sockets import SocketOptions, new_context
from kvbus.errors import KVBusError
from kvbus.protocol.message import R, Request


@asynccontextmanager
async def agent_client(
    endpoint: str, *, curve: ClientCurve | None = None
) -> AsyncIterator[RequestClient]:
    """Several requests to one agent; what they raise is to be caught in the block.

    Raises `ConfigError` for an endpoint or a key that is none.
    """
    with new_context() as context:
        options = SocketOptions(curve=curve)
        client = RequestClient(context, endpoint, boot=new_boot_id(), options=options)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            yield client
            tasks.cancel_scope.cancel()


async def ask_agent(
    endpoint: str, message: Request[R], *, timeout_s: float, curve: ClientCurve | None = None
) -> R:
    """The typed reply of the agent at ``endpoint``, which is asked with keys if it has some.

    Raises `RequestRefused`, `RequestTimeout`, `ConfigError` for an endpoint that is none, and
    `RemoteError` with code ``forbidden`` when the two have not the keys for each other.
    """
    outcome: R | KVBusError
    async with agent_client(endpoint, curve=curve) as client:
        try:
            outcome = await client.ask(message, timeout_s=timeout_s)
        except KVBusError as error:
            outcome = error
    if isinstance(outcome, KVBusError):
        raise outcome
    return outcome
