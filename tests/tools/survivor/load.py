"""The requests of a survivor run: offers that are fetched, all the time, until told to stop."""

import asyncio
import time
from collections.abc import Mapping
from itertools import count
from random import Random
from typing import Any

from tests.support.engine_program import Told, fetch_order
from tests.tools.survivor.cluster import BLOCK_TOKENS, MOST_TOKENS, Cluster
from tests.tools.survivor.draws import DECODE, PREFILL

NUM_WORKERS = 4
LATE_S = 15.0
"""Added to a deadline before the tool gives up an answer."""
PAUSE_S = 0.05
GROWS = 0.25
"""Share of offers that grow while they are read."""


class Load:
    """Requests between the engines of one cluster."""

    def __init__(self, cluster: Cluster, seed: str, *, timeout_s: float, ttl_s: float) -> None:
        self._cluster, self._random = cluster, Random(seed)
        self._timeout_s, self._ttl_s = timeout_s, ttl_s
        self._keys, self._is_over = count(1), False
        self._following = set[asyncio.Task[None]]()
        self.newest_completed_s = 0.0
        """Start of the newest completed request."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(NUM_WORKERS):
                workers.create_task(self._work())

    def stop(self) -> None:
        self._is_over = True

    async def settle(self) -> None:
        """Wait until every block is free or counted as lost."""
        await asyncio.gather(*self._following)
        for engine in self._cluster.engines.values():
            checked = await self._answer(engine.ask(0, {"do": "check"}).ended, LATE_S)
            if held := (checked or {}).get("held"):
                self._cluster.fail("blocks_lost", f"{engine.config.spec.engine_id} holds {held}")

    async def _work(self) -> None:
        while not self._is_over:
            await self._request()
            await asyncio.sleep(self._random.uniform(0, PAUSE_S))

    async def _request(self) -> None:
        """Offer, fetch, and count how it ended."""
        source, target = (self._cluster.engines[role] for role in (PREFILL, DECODE))
        num_tokens = BLOCK_TOKENS * round((MOST_TOKENS / BLOCK_TOKENS) ** self._random.random())
        steps = [num_tokens]
        if self._random.random() < GROWS:
            steps = [num_tokens // 3, 2 * num_tokens // 3, num_tokens]
        key, began_s = next(self._keys), time.monotonic()
        self._cluster.ledger.counts["requests"] += 1
        offered = source.ask(key, {"do": "offer", "steps": steps, "ttl_s": self._ttl_s})
        made = await self._answer(offered.made, self._timeout_s)
        if made is None or "ticket" not in made:
            self._fail("offer", made, began_s)
            return
        order = fetch_order(
            key, source.config.spec, made["ticket"], num_tokens, timeout_s=self._timeout_s
        )
        fetched = target.ask(next(self._keys), order)
        end = await self._answer(fetched.ended, self._timeout_s)
        if end is not None and end["outcome"] == "completed":
            self._cluster.ledger.completed(self._cluster.number, end["path"])
            self.newest_completed_s = max(self.newest_completed_s, began_s)
        else:
            source.tell({"do": "withdraw", "offer": key})
            if kept := self._fail("fetch", end, began_s):
                of_fetch = {"fetch_id": order["fetch_id"]}
                kept["decode"] = await self._cluster.history(DECODE, **of_fetch)
                of_offer = {"offer_id": made["offer_id"]}
                kept["prefill"] = await self._cluster.history(PREFILL, **of_offer)
        self._follow(fetched.freed, f"of a fetch that is {(end or {}).get('outcome')}")
        self._follow(offered.freed, f"of an offer whose fetch is {(end or {}).get('outcome')}")

    def _fail(
        self, what: str, told: Mapping[str, Any] | None, began_s: float
    ) -> dict[str, Any] | None:
        if told is None:
            of = f"{what} has no end after its deadline"
        else:
            words = (told.get(name, "") for name in ("outcome", "stage", "code", "message"))
            of = " ".join([what, *filter(None, words)])
        return self._cluster.fail("failed", of, after_s=round(time.monotonic() - began_s, 2))

    def _follow(self, freed: "asyncio.Future[Told]", what: str) -> None:
        """Count the blocks as lost if they are never reported free."""
        task = asyncio.create_task(self._wait_free(freed, what))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _wait_free(self, freed: "asyncio.Future[Told]", what: str) -> None:
        if await self._answer(freed, self._ttl_s) is None:
            self._cluster.fail("blocks_lost", f"blocks {what} never came back")

    async def _answer(self, future: "asyncio.Future[Told]", within_s: float) -> Told | None:
        done, _ = await asyncio.wait([future], timeout=within_s + LATE_S)
        return future.result() if done else None
