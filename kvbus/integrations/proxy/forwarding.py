"""One request of a client from its first byte to its last: both steps, while the client stays.

    client ──▶ prefill server: one token, and a ticket ──▶ decode server with the ticket ──▶ client

    With ``overlap`` both get it at once, and a name for the offer. What an answer has for the next
    turn of its conversation goes with that turn to a prefill server.

Refuses requests past the limit and bodies that it cannot read, to read the ticket, and to ask a
second decode server once one may have used the ticket. Notices a client that leaves.
"""

from collections.abc import Callable
from typing import Any

import anyio
import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvbus.errors import ErrorCode, PeerLost
from kvbus.integrations.proxy.access_log import AccessLog, RequestEnd, RequestRecord
from kvbus.integrations.proxy.bodies import (
    TRANSFER_PARAMS,
    ClientRequest,
    Headers,
    NotServed,
    ServerRequest,
    TransferParams,
    broken_stream,
    headers_of,
    passed_on,
    read_body,
    refusal,
    request_id_of,
    why_alone,
)
from kvbus.integrations.proxy.conversations import Conversations, conversation_of
from kvbus.integrations.proxy.meetings import PrefillAgents, params_of
from kvbus.integrations.proxy.options import IfPrefillFails, ProxyOptions
from kvbus.integrations.proxy.releases import TicketReleases
from kvbus.integrations.proxy.servers import Server
from kvbus.integrations.proxy.upstream import Upstream, translated
from kvbus.protocol.ticket import Rendezvous

ASK_FOR_TICKET: TransferParams = {"do_remote_decode": True}


class Forwarding:
    """An ASGI application for the paths that generate.

    A prefill server that cannot be reached, breaks off, or answers anything but 200 or 4xx has
    failed, and the next one in turn is asked; when all have, ``if_prefill_fails`` decides. A 4xx is
    the client's mistake, and the client's response. A decode server that cannot be reached has not
    seen the ticket, so the next one gets it; any other end is the client's response. A ticket that
    no decode server was sent is released.
    """

    def __init__(self, options: ProxyOptions, upstream: Upstream) -> None:
        self._options, self._upstream = options, upstream
        self.access_log, self.releases = AccessLog(), TicketReleases(options, upstream)
        self._agents, self._conversations = PrefillAgents(), Conversations()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        http = Request(scope, receive)
        record = RequestRecord(request_id_of(http), scope["path"])
        with self.access_log.following(record):
            try:
                request = await self._read(http, record)
            except ClientDisconnect:
                record.outcome = RequestEnd.CLIENT_GONE
            except NotServed as error:
                record.trouble = error.message
                await _send_whole(send, refusal(error.status, error.code, error.message), record)
            else:
                await self._while_client_stays(request, receive, send)

    async def _read(self, http: Request, record: RequestRecord) -> ClientRequest:
        most = self._options.max_in_flight
        if self.access_log.num_in_flight > most:
            record.outcome = RequestEnd.BUSY
            raise NotServed(503, f"{most} requests are in flight: try later", ErrorCode.BUSY)
        body = await read_body(http, max_bytes=self._options.max_body_bytes)
        return ClientRequest(http, body, record, conversation_of(body))

    async def _while_client_stays(
        self, request: ClientRequest, receive: Receive, send: Send
    ) -> None:
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                if request.record.outcome is None:
                    request.record.outcome = RequestEnd.CLIENT_GONE
                    tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await self._serve(request, send)
            tasks.cancel_scope.cancel()

    async def _serve(self, request: ClientRequest, send: Send) -> None:
        """Both steps; cancelled at any point, the server's connection is closed."""
        if self._options.overlap and not why_alone(request.body):
            server = self._upstream.prefill.next_one
            meets = server and self._agents.meet(server, request.record.request_id)
            if server and meets and await self._served_at_once(request, server, meets, send):
                return
        params = None
        if reason := why_alone(request.body):
            request.record.handover = reason
        else:
            prefilled = await self._prefilled(request)
            if isinstance(prefilled, Response):
                await _send_whole(send, prefilled, request.record)
                return
            params = prefilled
        to_decode = request.for_decode(params)
        try:
            await self._decoded(request, to_decode, send)
        finally:
            if params is not None and not to_decode.sent:
                self.releases.start(request, params)

    async def _served_at_once(
        self, request: ClientRequest, server: Server, meets: Rendezvous, send: Send
    ) -> bool:
        """Ask both servers; False when prefill failed and the client has heard nothing yet."""
        next(self._upstream.prefill.in_turn())  # which is this server
        record, (to_prefill, to_decode) = request.record, params_of(meets)
        to_prefill = {**self._turn_of(request), **to_prefill}
        record.prefill, record.handover = server.url, "met"
        with anyio.CancelScope() as decoding:

            async def prefill() -> None:
                try:
                    await self._ask_for_ticket(server, request, to_prefill)
                except PrefillFailed as error:
                    record.prefill_failures.append(error.message)
                    if record.status is None:
                        decoding.cancel()
                else:
                    record.prefill_s = record.so_far_s

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(prefill)
                await self._decoded(request, request.for_decode(to_decode), send)
                tasks.cancel_scope.cancel()
        return record.status is not None

    async def _prefilled(self, request: ClientRequest) -> TransferParams | Response | None:
        """The ticket, None to decode without one, or what the client is told at once."""
        record = request.record
        record.handover = "no_prefill_server"
        failure = refusal(503, "no_prefill_server", "no prefill server is healthy")
        params = self._turn_of(request)
        for server in self._upstream.prefill.in_turn():
            record.prefill = server.url
            try:
                prefilled = await self._ask_for_ticket(server, request, params)
            except PrefillFailed as error:
                params = ASK_FOR_TICKET
                record.handover = "prefill_failed"
                record.prefill_failures.append(error.message)
                failure = error.response
            else:
                record.prefill_s = record.so_far_s
                return prefilled
        return failure if self._options.if_prefill_fails is IfPrefillFails.REFUSE else None

    async def _ask_for_ticket(
        self, server: Server, request: ClientRequest, params: TransferParams
    ) -> TransferParams | Response | None:
        """The ticket, or the client's mistake; raises `PrefillFailed`."""
        try:
            response = await self._upstream.whole(server, request.for_one_token(params))
        except PeerLost as error:
            told = refusal(502, "prefill_lost", error.message, server)
            raise PrefillFailed(told, error.message) from error
        status = response.status_code
        if response.is_client_error:
            request.record.handover = "refused"
            return passed_on(server, response)
        if response.is_server_error:
            raise PrefillFailed(passed_on(server, response), f"{server} answered {status}")
        completion = _object_of(response) if status == httpx.codes.OK else None
        if completion is None:
            trouble = f"{server} answered {status} with what is no completion"
            raise PrefillFailed(refusal(502, "prefill_unreadable", trouble, server), trouble)
        ticket = completion.get(TRANSFER_PARAMS)
        usable = ticket if isinstance(ticket, dict) and ticket else None
        if usable is not None:
            self._agents.learn(server, usable)
        if request.record.handover != "met":
            request.record.handover = "not_offered" if usable is None else "handed_over"
        return usable

    def _turn_of(self, request: ClientRequest) -> TransferParams:
        """What asks a prefill server for a ticket, and may bring that of the turn before."""
        return self._conversations.take(request.conversation_id) or ASK_FOR_TICKET

    async def _decoded(self, asked: ClientRequest, request: ServerRequest, send: Send) -> None:
        refused, record = None, asked.record
        for server in self._upstream.decode.in_turn():
            record.decode = server.url
            try:
                async with self._upstream.streamed(server, request) as response:
                    keep = self._conversations.keeper(asked.conversation_id)
                    await _stream(server, response, send, record, keep)
                return
            except PeerLost as error:
                record.trouble = error.message
                refused = refusal(502, "decode_lost", error.message, server)
                if error.code is not ErrorCode.PEER_UNREACHABLE:
                    break
        if refused is None:
            record.outcome = RequestEnd.UNAVAILABLE
            refused = refusal(503, "no_decode_server", "no decode server is healthy")
        await _send_whole(send, refused, record)


class PrefillFailed(PeerLost):
    """A prefill server did not do its part; ``response`` is what the client would be told."""

    def __init__(self, response: Response, message: str) -> None:
        super().__init__(message)
        self.response = response


async def _stream(
    server: Server,
    response: httpx.Response,
    send: Send,
    record: RequestRecord,
    keep: Callable[[bytes], None] | None,
) -> None:
    """Pass the response on; a whole one in JSON is shown to ``keep`` before the client has it."""
    record.status = response.status_code
    await _start(send, response.status_code, headers_of(server, response), record)
    kind = response.headers.get("content-type", "")
    shown = bytearray() if keep is not None and kind.startswith("application/json") else None

    async def take(chunk: bytes) -> None:
        record.saw_bytes()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    try:
        with translated(server):
            async for chunk in response.aiter_raw():
                if shown is None:
                    await take(chunk)
                else:
                    shown += chunk
    except PeerLost as error:
        record.trouble, record.outcome = error.message, RequestEnd.FAILED
        if kind.startswith("text/event-stream"):
            await take(broken_stream(error.message))
        return  # without an end, so that HTTP itself says that the response is not whole
    if keep is not None and shown is not None:
        keep(bytes(shown))
        await take(bytes(shown))
    record.ended(response.status_code)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_whole(send: Send, response: Response, record: RequestRecord) -> None:
    record.ended(response.status_code)
    await _start(send, response.status_code, response.raw_headers, record)
    await send({"type": "http.response.body", "body": response.body})


async def _start(send: Send, status: int, headers: Headers, record: RequestRecord) -> None:
    said = {
        "x-request-id": record.request_id,
        "x-kvbus-prefill": record.prefill,
        "x-kvbus-decode": record.decode,
    }
    ours = [(name.encode(), value.encode("latin-1")) for name, value in said.items() if value]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *ours]})


def _object_of(response: httpx.Response) -> dict[str, Any] | None:
    try:
        parsed = response.json()
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
