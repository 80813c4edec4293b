"""The first READ from a peer, made before a fetch needs one: it is what sets UCX's connection up.

Refuses to touch KV of ours: the bytes land in a page of its own, and nobody looks at them.
"""

import asyncio

import anyio
import numpy as np

from kvbus.agent.process.service import Agent
from kvbus.bus import new_boot_id
from kvbus.errors import ErrorCode, KVBusError, RequestTimeout
from kvbus.memory.segment import SharedSegment
from kvbus.transport import ReadOutcome
from kvbus_decode.peer.memory_check import check_memory
from kvbus_decode.peer.route import Route, Source

NUM_BYTES = 64
PAGE_BYTES = 4096


class FirstReader:
    """Reads a few bytes of each source of a route, once it drives its progress for us."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._page: SharedSegment | None = None
        self._made = anyio.Lock()
        self._under_way: dict[str, asyncio.Future[ReadOutcome]] = {}
        """By NIXL agent: where one has not ended, another one would not, either."""

    async def read(self, route: Route, *, timeout_s: float) -> int:
        """How many were read; what NIXL knows no memory of is left alone. Raises `KVBusError`."""
        wanted = [(source, _first_address(source)) for source in route.sources]
        num_read = 0
        for source, address in wanted:
            if address is not None:
                await self._read(route, source, address, timeout_s)
                num_read += 1
        return num_read

    async def _read(self, route: Route, source: Source, address: int, timeout_s: float) -> None:
        name = f"first-read-{new_boot_id()}"
        await self._ask(route, source, name, timeout_s=timeout_s, progress_s=timeout_s)
        try:
            with anyio.fail_after(timeout_s):
                scratch = await self._scratch()
                read = self._under_way.get(source.nixl_agent)
                outcome = await asyncio.shield(read or self._post(source, address, scratch))
        except TimeoutError as error:
            raise RequestTimeout(
                f"the first READ from the agent at {source.peer.endpoint} has not ended within "
                f"{timeout_s:g} s: do both sides reach each other on data_interfaces (kvbus doctor "
                "--peer)?",
                code=ErrorCode.PEER_UNREACHABLE,
                endpoint=source.peer.endpoint,
            ) from error
        if outcome.error is not None:
            raise outcome.error
        await self._ask(route, source, name, timeout_s=timeout_s)

    def _post(self, source: Source, address: int, scratch: int) -> asyncio.Future[ReadOutcome]:
        ended: asyncio.Future[ReadOutcome] = self._agent.loop.create_future()

        def settle(outcome: ReadOutcome) -> None:
            del self._under_way[source.nixl_agent]
            ended.set_result(outcome)

        self._under_way[source.nixl_agent] = ended
        try:
            self._agent.transport.read(
                source.nixl_agent, _row(scratch), _row(address), on_end=settle, priority=-1
            )
        except KVBusError:
            del self._under_way[source.nixl_agent]
            raise
        return ended

    async def _scratch(self) -> int:
        """Where the bytes go; it stays registered until the agent ends."""
        async with self._made:
            if self._page is None:
                page = SharedSegment(PAGE_BYTES, name="kvbus-first-read")
                await asyncio.wrap_future(self._agent.transport.register(page.address, PAGE_BYTES))
                self._page = page
        return self._page.address

    async def _ask(
        self, route: Route, source: Source, name: str, *, timeout_s: float, progress_s: float = 0.0
    ) -> None:
        """Have the peer drive its NIXL for so long; 0 ends that."""
        asked: asyncio.Future[KVBusError | None] = self._agent.loop.create_future()

        def settle(error: KVBusError | None) -> None:
            if not asked.done():
                asked.set_result(error)

        check_memory(
            route, [source], name, timeout_s=timeout_s, on_end=settle, progress_s=progress_s
        )
        if (error := await asked) is not None:
            raise error


def _first_address(source: Source) -> int | None:
    """Where registered memory of the peer begins; None when NIXL knows none of its engine."""
    addresses = (one for placed in source.ranks.values() for one in placed.addresses.values())
    return next(addresses, None)


def _row(address: int) -> "np.ndarray[tuple[int, int], np.dtype[np.uint64]]":
    return np.array([[address, NUM_BYTES, 0]], dtype=np.uint64)
