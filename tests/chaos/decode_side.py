"""What a decode engine of a chaos run does: fetches, compares every byte, and guards free blocks.

A completed fetch is compared at once, and again before its blocks are given back.
"""

import functools
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import torch

from kvbus.engine import Fetch, KeptSession
from kvbus.engine.bounce import HostDecode
from kvbus.errors import ErrorCode, FetchFailed, KVBusError
from kvbus.geometry import num_blocks_for
from tests.chaos.engine_memory import EngineMemory
from tests.chaos.pattern import expected, num_wrong_bytes
from tests.chaos.shapes import BY_NAME
from tests.chaos.strictness import ChaosDecode
from tests.expected import positions

ROOM_WITHIN_S = 2.0
PIECE_BYTES = 256 << 10


class DecodeSide:
    """The fetches of an engine, by the session that there is."""

    def __init__(
        self, memory: EngineMemory, control: KeptSession[ChaosDecode], tell: Callable[..., None]
    ) -> None:
        self._memory, self.control, self._tell = memory, control, tell
        self._views, self._pool = memory.views, memory.pool
        self._fetches: dict[int, Any] = {}
        self._host: HostDecode | None = None
        if memory.ring is not None:
            self._host = HostDecode(
                control.latest, *memory.ring, piece_bytes=PIECE_BYTES, wait_s=ROOM_WITHIN_S
            )

    async def open(self, stack: AsyncExitStack) -> None:
        """Begin, until ``stack`` ends."""
        if self._host is not None:
            await stack.enter_async_context(self._host)

    @property
    def num_held(self) -> int:
        """Blocks that are not free."""
        ring = self._memory.ring[0].num_held if self._memory.ring is not None else 0
        return self._pool.num_held + ring

    def check(self) -> None:
        """No free block may have changed."""
        self._pool.check()
        self.control.latest.look()

    async def obey(self, order: dict[str, Any]) -> None:
        """``fetch`` or ``cancel``."""
        if order["do"] == "cancel":
            await self._cancel(order)
            return
        key, first, stop = order["key"], order["first_token"], order["num_tokens"]
        wanted = {}
        for group in self._memory.spec.groups:
            at = positions(group, first, stop)
            size = group.block_size
            wanted[group.name] = num_blocks_for(at.stop, size) - at.start // size if at else 0
        blocks = self._pool.take(wanted, f"fetch {key}")
        if blocks is None:
            self._tell("fetched", key=key, outcome="refused", code="full", stage="", fetch_id="")
            return
        if await self._fetch(order, blocks):
            self._pool.give(blocks)
        else:  # new memory, as `Fetch.blocks_freed` says; here with all that the engine has
            os._exit(0)

    async def _cancel(self, order: dict[str, Any]) -> None:
        fetch = self._fetches.get(order["fetch"])
        try:
            if isinstance(fetch, Fetch):
                await fetch.cancel(release_offer=order["release_offer"])
            elif fetch is not None:
                await fetch.cancel()
        except KVBusError:
            return

    async def _fetch(self, order: dict[str, Any], blocks: dict[str, list[int]]) -> bool:
        """Until its blocks are free; False when nobody says so."""
        key, session = order["key"], self.control.latest
        try:
            start = self._start(order, session)
            fetch = self._fetches[key] = start(block_ids=blocks)
        except KVBusError as error:
            self._tell_failed(key, "", "lost", error)
            self._tell("freed", key=key, is_free=True)
            return True
        is_free = True
        try:
            fetched = await fetch.completed()
            self._compare(order, fetch, blocks, "")
            self._tell("fetched", key=key, outcome="completed", path=fetched.path,
                       num_bytes=fetched.num_bytes, fetch_id=fetch.fetch_id)  # fmt: skip
            await anyio.sleep(order["hold_s"])
            self._compare(order, fetch, blocks, " later")
        except FetchFailed as error:
            self._tell_failed(key, fetch.fetch_id, error.stage, error)
            if (error.stage, error.code) == ("lost", ErrorCode.CLOSED):
                session.report("closed_early", f"fetch {key}: {error}")
            is_free = await self._freed(fetch)
            if _is_ring_in_doubt(error):
                self._tell("in_doubt", why=f"{self._memory.shape.name}, ring: {error.message}")
                is_free = False
        finally:
            del self._fetches[key]
        self._tell("freed", key=key, is_free=is_free)
        return is_free

    def _start(self, order: dict[str, Any], session: ChaosDecode) -> Callable[..., Any]:
        more = {name: order[name] for name in ("num_tokens", "first_token", "timeout_s")}
        more["zero_tail"] = order["zero_tail"]
        more["fetch_id"] = order["fetch_id"]
        if self._host is not None:
            self._host.session = session
            return functools.partial(self._host.fetch, order["ticket"], **more)
        more["piece_tokens"] = order["piece_tokens"]
        return functools.partial(session.fetch, order["ticket"], **more)

    async def _freed(self, fetch: Any) -> bool:
        try:
            await fetch.blocks_freed()
        except KVBusError as error:
            self._tell("in_doubt", why=f"{self._memory.shape.name}: {error!r}")
            return False
        return True

    def _tell_failed(self, key: int, fetch_id: str, stage: str, error: KVBusError) -> None:
        outcome, code = "failed", error.code.value
        self._tell(
            "fetched", key=key, outcome=outcome, code=code, stage=stage, fetch_id=fetch_id,
            message=error.message,
        )  # fmt: skip

    def _compare(
        self, order: dict[str, Any], fetch: Any, blocks: dict[str, list[int]], when: str
    ) -> None:
        """Every byte of the blocks of a fetch that the agent calls valid."""
        num_wrong = 0
        holder = BY_NAME[order["from"]].spec if self._host is None else None
        for view in self._views:
            ids = torch.as_tensor(blocks[view.group.name], dtype=torch.int64)
            want = expected(
                order["offer"],
                view,
                blocks[view.group.name],
                holder=holder,
                first=order["first_token"],
                stop=order["num_tokens"],
                zero_tail=order["zero_tail"],
            )
            num_wrong += num_wrong_bytes(view.bits[ids], want)
        if num_wrong:
            what = f"{num_wrong} bytes{when} of fetch {fetch.fetch_id} of offer {order['offer']}"
            self._tell("violation", what="wrong_bytes", of=f"{self._memory.shape.name}: {what}",
                       fetch_id=fetch.fetch_id)  # fmt: skip


def _is_ring_in_doubt(error: FetchFailed) -> bool:
    """Whether nobody says when its host blocks are free: the agent hung up, and lives on."""
    inner = error.__cause__
    return isinstance(inner, FetchFailed) and inner.stage == "lost" and not inner.blocks_free
