"""The router's part: a request goes to the prefill engine, and its ticket to the decode engine.

Refuses to leave an offer behind: the offer of a request that failed after it is withdrawn.
"""

from collections.abc import Callable
from contextlib import suppress

import anyio

from kvbus.bus import ask_agent
from kvbus.demo.options import DemoOptions, num_tokens
from kvbus.demo.outcome import Leaks, Served
from kvbus.demo.processes import Processes
from kvbus.demo.work import (
    Decode,
    Decoded,
    Failed,
    FirstToken,
    Offered,
    Prefill,
    Prefilled,
    Settle,
    Settled,
)
from kvbus.errors import RequestRefused
from kvbus.protocol.peer import PeerWithdraw, Status
from kvbus.protocol.ticket import Ticket

ASK_TIMEOUT_S = 5.0


class Router:
    """Serves the requests of one run."""

    def __init__(self, options: DemoOptions, processes: Processes) -> None:
        self._options = options
        self._prefill, self._decode = processes.prefill, processes.decode

    async def serve_all(self, on_served: Callable[[], None]) -> list[Served]:
        """All requests, some of them in flight at a time; in the order of their numbers."""
        served: dict[int, Served] = {}
        numbers = iter(range(self._options.num_requests))

        async def serve_in_turn() -> None:
            for number in numbers:
                served[number] = await self._serve(number)
                on_served()

        async with anyio.create_task_group() as tasks:
            for _ in range(self._options.concurrency):
                tasks.start_soon(serve_in_turn)
        return [served[number] for number in sorted(served)]

    async def count_leaks(self) -> Leaks:
        """What engines and agents hold after the last request."""
        prefill, decode = await self._prefill.ready(), await self._decode.ready()
        settled = [await engine.ask(Settle(), Settled) for engine in (self._prefill, self._decode)]
        prefill_blocks, decode_blocks = (
            one.num_blocks_held for one in settled if isinstance(one, Settled)
        )
        counts: dict[str, int] = {}
        for endpoint in (prefill.agent_endpoint, decode.agent_endpoint):
            status = await ask_agent(endpoint, Status(), timeout_s=ASK_TIMEOUT_S)
            counts |= status.counts
        return Leaks(prefill_blocks, decode_blocks, counts["offers"], counts["fetches"])

    async def _serve(self, number: int) -> Served:
        """The ticket goes to decode at once, the first token when prefill is done."""
        prompt, request_id = self._options.prompt(number), f"request-{number}"
        prefilling = self._prefill.expect(request_id, Prefilled)
        offered = await self._prefill.ask(Prefill(request_id, prompt), Offered)
        if isinstance(offered, Failed):
            return Served(request_id, prompt, failed=offered)
        decode = Decode(
            request_id=request_id,
            ticket=offered.ticket,
            num_tokens=num_tokens(prompt),
            num_steps=self._options.max_new_tokens - 1,
        )
        decoding = self._decode.expect(request_id, Decoded)
        await self._decode.tell(decode)
        prefilled = await prefilling
        if isinstance(prefilled, Failed):
            await decoding  # the offer was withdrawn, and its fetch fails
            return Served(request_id, prompt, failed=prefilled)
        await self._decode.tell(FirstToken(request_id, prefilled.step.token))
        decoded = await decoding
        if isinstance(decoded, Failed):
            await self._withdraw(Ticket.from_json(offered.ticket))
            return Served(request_id, prompt, prefilled, failed=decoded)
        return Served(request_id, prompt, prefilled, decoded)

    async def _withdraw(self, ticket: Ticket) -> None:
        message = PeerWithdraw(agent_boot=ticket.agent_boot, offer_id=ticket.offer_id)
        with suppress(RequestRefused):  # it has ended already
            await ask_agent(ticket.endpoint, message, timeout_s=ASK_TIMEOUT_S)
