"""The first step of a request: a prefill server computes the prompt and names a ticket.

Refuses to read the ticket: it is passed on as it came.
"""

from typing import Any

import httpx

from kvbus.errors import PeerLost
from kvbus.integrations.proxy.answers import Answer, passed_on, refusal
from kvbus.integrations.proxy.asked import Asked
from kvbus.integrations.proxy.bodies import ASK_FOR_TICKET, PARAMS, Params, one_token_body
from kvbus.integrations.proxy.options import IfPrefillFails
from kvbus.integrations.proxy.record import FIRST_ERROR_STATUS, FIRST_FAILURE_STATUS
from kvbus.integrations.proxy.servers import Server, ServerPool
from kvbus.integrations.proxy.upstream import Upstream


class Prefilling:
    """Asks the healthy prefill servers, the next in turn first.

    A server that cannot be reached, breaks off, or answers anything but 200 or 4xx has failed, and
    the next one is asked. When all have, ``if_prefill_fails`` decides. A 4xx is the client's
    mistake, and the client's answer.
    """

    def __init__(
        self, upstream: Upstream, servers: ServerPool, if_prefill_fails: IfPrefillFails
    ) -> None:
        self._upstream = upstream
        self._servers = servers
        self._if_prefill_fails = if_prefill_fails

    async def ticket(self, asked: Asked) -> Params | Answer | None:
        """The ticket, None to decode without one, or what the client is answered at once."""
        record = asked.record
        record.handover = "no_prefill_server"
        failure = refusal(503, "no_prefill_server", "no prefill server is healthy")
        for server in self._servers.in_turn():
            record.prefill = server.url
            outcome = await self._ask(server, asked)
            if not isinstance(outcome, _Failure):
                record.prefill_s = record.so_far_s
                return outcome
            record.handover = "prefill_failed"
            record.prefill_failures.append(outcome.trouble)
            failure = outcome.answer
        return failure if self._if_prefill_fails is IfPrefillFails.REFUSE else None

    async def _ask(self, server: Server, asked: Asked) -> "Params | Answer | _Failure | None":
        try:
            call = asked.call(one_token_body(asked.body, ASK_FOR_TICKET))
            response = await self._upstream.whole(server, call)
        except PeerLost as error:
            return _Failure(refusal(502, "prefill_lost", error.message, server), error.message)
        status = response.status_code
        if FIRST_ERROR_STATUS <= status < FIRST_FAILURE_STATUS:
            asked.record.handover = "refused"
            return passed_on(server, response)
        if status >= FIRST_FAILURE_STATUS:
            return _Failure(passed_on(server, response), f"{server} answered {status}")
        answer = _object_of(response) if status == httpx.codes.OK else None
        if answer is None:
            trouble = f"{server} answered {status} with what is no completion"
            return _Failure(refusal(502, "prefill_unreadable", trouble, server), trouble)
        params = answer.get(PARAMS)
        usable = isinstance(params, dict) and bool(params)
        asked.record.handover = "handed_over" if usable else "not_offered"
        return params if usable else None


class _Failure:
    """What the client would be told, and what is logged."""

    def __init__(self, answer: Answer, trouble: str) -> None:
        self.answer = answer
        self.trouble = trouble


def _object_of(response: httpx.Response) -> dict[str, Any] | None:
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None
