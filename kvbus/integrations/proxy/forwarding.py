"""One request of a client from its first byte to its last: both steps, while the client stays.

Refuses requests past the limit, and bodies that it cannot read; notices a client that leaves.
"""

import anyio
from starlette.types import Receive, Scope, Send

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.integrations.proxy.answers import Answer, refusal
from kvbus.integrations.proxy.asked import (
    Asked,
    ClientGone,
    headers_for_servers,
    read_body,
    request_id_of,
    target_of,
)
from kvbus.integrations.proxy.bodies import why_alone
from kvbus.integrations.proxy.decoding import Decoding
from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.prefilling import Prefilling
from kvbus.integrations.proxy.record import Ledger, Outcome, RequestRecord


class Forwarding:
    """An ASGI application for the paths that generate."""

    def __init__(
        self, options: ProxyOptions, ledger: Ledger, prefilling: Prefilling, decoding: Decoding
    ) -> None:
        self._options = options
        self._ledger = ledger
        self._prefilling = prefilling
        self._decoding = decoding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        record = RequestRecord(request_id_of(scope), scope["path"])
        with self._ledger.following(record):
            try:
                asked = await self._read(scope, receive, record)
            except ClientGone:
                record.outcome = Outcome.CLIENT_GONE
            except RequestRefused as error:
                await self._refuse(error, send, record)
            else:
                await self._while_client_stays(asked, receive, send)

    async def _read(self, scope: Scope, receive: Receive, record: RequestRecord) -> Asked:
        most = self._options.max_in_flight
        if self._ledger.num_in_flight > most:
            raise RequestRefused(f"{most} requests are in flight: try later", code=ErrorCode.BUSY)
        body = await read_body(receive, self._options.max_body_bytes)
        return Asked(target_of(scope), headers_for_servers(scope, record.request_id), body, record)

    async def _refuse(self, error: RequestRefused, send: Send, record: RequestRecord) -> None:
        if error.code is ErrorCode.BUSY:
            record.outcome = Outcome.BUSY
        status = {ErrorCode.BUSY: 503, ErrorCode.TOO_LARGE: 413}.get(error.code, 400)
        record.trouble = error.message
        await refusal(status, error.code, error.message).send(send, record)

    async def _while_client_stays(self, asked: Asked, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                if asked.record.outcome is None:
                    asked.record.outcome = Outcome.CLIENT_GONE
                    tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await self._serve(asked, send)
            tasks.cancel_scope.cancel()

    async def _serve(self, asked: Asked, send: Send) -> None:
        params = None
        if reason := why_alone(asked.body):
            asked.record.handover = reason
        else:
            prefilled = await self._prefilling.ticket(asked)
            if isinstance(prefilled, Answer):
                await prefilled.send(send, asked.record)
                return
            params = prefilled
        await self._decoding.answer(asked, params, send)
