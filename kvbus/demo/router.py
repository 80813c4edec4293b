"""The router's part: a request goes to the prefill engine, and its ticket to the decode engine.

Refuses to leave an offer behind: the offer of a request that failed after it is withdrawn.
"""

from collections.abc import Callable
from contextlib import suppress

import anyio

from kvbus.bus import ask_agent
from kvbus.demo.messages import (
    Decode,
    Decoded,
    Failed,
    FirstToken,
    Offered,
    Prefill,
    Prefilled,
    Ready,
    Settle,
    Settled,
)
from kvbus.demo.options import num_tokens
from kvbus.demo.processes import EngineLine, Processes
from kvbus.demo.report import DemoReport, Leaks, Served
from kvbus.errors import PeerLost, RequestRefused
from kvbus.protocol.peer import PeerWithdraw, Status
from kvbus.protocol.ticket import Ticket

ASK_TIMEOUT_S = 60.0


class Router:
    """Serves the requests of one run, and writes into its report what came of them."""

    def __init__(self, report: DemoReport, processes: Processes) -> None:
        self._options, self._report = report.options, report
        self._prefill, self._decode = processes.lines
        self._endpoints: list[str] = []

    async def wait_ready(self) -> None:
        """Return once both engines are registered with their agents."""
        for engine in (self._prefill, self._decode):
            ready = await engine.answer("ready", Ready)
            if isinstance(ready, Failed):
                raise PeerLost(f"an engine did not start: {ready.message}")
            self._endpoints.append(ready.agent_endpoint)

    async def serve_all(self, on_served: Callable[[], None]) -> None:
        """All requests, some of them in flight at a time."""
        numbers = iter(range(self._options.num_requests))

        async def serve_in_turn() -> None:
            for number in numbers:
                served = Served(f"request-{number}", self._options.prompt(number))
                self._report.served.append(served)
                await self._serve(served)
                on_served()

        async with anyio.create_task_group() as tasks:
            for _ in range(self._options.concurrency):
                tasks.start_soon(serve_in_turn)

    async def count_leaks(self) -> None:
        """What engines and agents hold after the last request."""
        prefill_blocks = await self._num_blocks_held(self._prefill)
        decode_blocks = await self._num_blocks_held(self._decode)
        counts: dict[str, int] = {}
        for endpoint in self._endpoints:
            status = await ask_agent(endpoint, Status(), timeout_s=ASK_TIMEOUT_S)
            counts |= status.counts
        held = prefill_blocks, decode_blocks, counts["offers"], counts["fetches"]
        self._report.leaks = Leaks(*held)

    async def _num_blocks_held(self, engine: EngineLine) -> int:
        await engine.tell(Settle())
        settled = await engine.answer("settle", Settled)
        if isinstance(settled, Failed):
            raise PeerLost(f"an engine cannot say which blocks it holds: {settled.message}")
        return settled.num_blocks_held

    async def _serve(self, served: Served) -> None:
        """The ticket goes to decode at once, the first token when prefill is done."""
        prefill, decode, request_id = self._prefill, self._decode, served.request_id
        await prefill.tell(Prefill(request_id, served.prompt))
        offered = await prefill.answer(request_id, Offered)
        if isinstance(offered, Failed):
            served.failed = offered
        else:
            await decode.tell(
                Decode(
                    request_id=request_id,
                    ticket=offered.ticket,
                    num_tokens=num_tokens(served.prompt),
                    num_steps=self._options.max_new_tokens - 1,
                )
            )
            await self._go_on(served, offered)
        for engine in (prefill, decode):
            engine.forget(request_id)

    async def _go_on(self, served: Served, offered: Offered) -> None:
        request_id = served.request_id
        prefilled = await self._prefill.answer(request_id, Prefilled)
        if isinstance(prefilled, Failed):
            await self._decode.answer(request_id, Decoded)  # the offer is withdrawn: it fails
            served.failed = prefilled
            return
        served.prefilled = prefilled
        await self._decode.tell(FirstToken(request_id, prefilled.step.token))
        decoded = await self._decode.answer(request_id, Decoded)
        if isinstance(decoded, Failed):
            await self._withdraw(Ticket.from_json(offered.ticket))
            served.failed = decoded
        else:
            served.decoded = decoded

    async def _withdraw(self, ticket: Ticket) -> None:
        message = PeerWithdraw(agent_boot=ticket.agent_boot, offer_id=ticket.offer_id)
        with suppress(RequestRefused):  # it has ended already
            await ask_agent(ticket.endpoint, message, timeout_s=ASK_TIMEOUT_S)
