"""The router's part: a request goes to the prefill engine, and its ticket to the decode engine.

Refuses to leave an offer behind: the offer of a request that failed after it is withdrawn.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import count

import anyio

from kvbus.bus import ask_agent
from kvbus.demo.messages import (
    NO_REQUEST,
    Decode,
    Decoded,
    FirstToken,
    Offered,
    Prefill,
    Prefilled,
    Ready,
    Settle,
    Settled,
)
from kvbus.demo.processes import ROLES, Processes
from kvbus.demo.prompts import encode
from kvbus.demo.report import DemoReport, Served
from kvbus.errors import RequestRefused
from kvbus.protocol.peer import PeerWithdraw
from kvbus.protocol.status import Status
from kvbus.protocol.ticket import Ticket

ASK_TIMEOUT_S = 60.0


class Router:
    """Serves the requests of one run, and writes into its report what came of them."""

    def __init__(self, report: DemoReport, processes: Processes) -> None:
        self._options, self._report = report.options, report
        self._prefill, self._decode = self._engines = processes.lines
        self._keys = processes.keys
        self._endpoints: list[str] = []

    async def wait_ready(self) -> None:
        """Return once both engines are registered with their agents."""
        for engine in self._engines:
            ready = await engine.answer(NO_REQUEST, Ready)
            self._endpoints.append(ready.agent_endpoint)

    async def serve_all(self, on_ended: Callable[[int], None]) -> None:
        """All requests, some in flight at a time; ``on_ended`` is told how many have ended."""
        numbers = iter(range(self._options.requests))
        prompts, num_ended = self._options.prompts, count(1)

        async def serve_in_turn() -> None:
            for number in numbers:
                served = Served(f"request-{number}", prompts[number % len(prompts)])
                self._report.served.append(served)
                try:
                    await self._hand_off(served)
                except RequestRefused as error:
                    served.failed = error
                for engine in self._engines:
                    engine.forget(served.request_id)
                on_ended(next(num_ended))

        async with anyio.create_task_group() as tasks:
            for _ in range(self._options.concurrency):
                tasks.start_soon(serve_in_turn)

    async def count_leaks(self) -> None:
        """What engines and agents hold after the last request."""
        leaks = {}
        for role, engine in zip(ROLES, self._engines, strict=True):
            await engine.send(Settle(NO_REQUEST))
            settled = await engine.answer(NO_REQUEST, Settled)
            leaks[f"blocks of the {role} engine"] = settled.num_blocks_held
        counts: dict[str, int] = {}
        for role, endpoint in zip(ROLES, self._endpoints, strict=True):
            curve = self._keys.of(role) if self._keys else None
            status = await ask_agent(endpoint, Status(), timeout_s=ASK_TIMEOUT_S, curve=curve)
            counts |= status.counts
        self._report.leaks = leaks | {what: counts[what] for what in ("offers", "fetches")}

    async def _hand_off(self, served: Served) -> None:
        """The ticket goes to decode at once, the first token when prefill is done."""
        request_id, num_tokens = served.request_id, len(encode(served.prompt))
        await self._prefill.send(Prefill(request_id, served.prompt))
        ticket = (await self._prefill.answer(request_id, Offered)).ticket
        num_steps = self._options.max_new_tokens - 1
        await self._decode.send(Decode(request_id, ticket, num_tokens, num_steps))
        try:
            served.prefilled = await self._prefill.answer(request_id, Prefilled)
        except RequestRefused:
            with suppress(RequestRefused):  # the offer is withdrawn, so this fails
                await self._decode.answer(request_id, Decoded)
            raise
        await self._decode.send(FirstToken(request_id, served.prefilled.step.token))
        try:
            served.decoded = await self._decode.answer(request_id, Decoded)
        except RequestRefused:
            await self._withdraw(Ticket.from_json(ticket))
            raise

    async def _withdraw(self, ticket: Ticket) -> None:
        message = PeerWithdraw(
            agent_boot=ticket.agent_boot, offer_id=ticket.offer_id, secret=ticket.secret
        )
        curve = self._keys.curve(ticket.server_key) if self._keys else None
        with suppress(RequestRefused):  # it has ended already
            await ask_agent(ticket.endpoint, message, timeout_s=ASK_TIMEOUT_S, curve=curve)
