"""The handoffs of a chaos run, from their offer to their end."""

import asyncio
import base64
import re
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import msgpack

from kvbus.protocol import Rendezvous
from tests.process.security.wire import FORGED
from tests.support.engine_program import Asked, Told, fetch_order
from tests.tools.chaos.draws import Draw, draw_handoff
from tests.tools.chaos.ledger import Ledger
from tests.tools.chaos.world import Engine, World

OVERDUE_S = 5.0
ROOM_S = 2.0
HOLD_S = 20.0
"""The longest that one reader may keep an offer (`max_hold_s`)."""
HELD_WITHIN_S = 3.0
"""An engine that is later may hold an offer too late, as its loop had no time."""
REPLY_S, FREE_S = 40.0, 60.0
CHECK_S = 0.5
NEVER = ("invalid", "internal", "offer_parked")
"""Codes of a mistake in an engine or an agent."""
LIVE = re.compile(" -> (open|sealed|parked): ")
"""The state of an offer in a line of its history."""


@dataclass(frozen=True)
class Wait:
    """An answer that an engine must send ``within_s``; ``about`` is for the agent of a late one."""

    engine: Engine
    what: str
    within_s: float
    about: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    key: int
    source: Engine
    asked: Asked
    offer_id: str
    ticket: Told


class Handoffs:
    """Makes handoffs in a world, and judges how they end: more strictly if nothing ``hurts``."""

    def __init__(self, world: World, ledger: Ledger, *, hurts: bool) -> None:
        self._world, self._ledger, self._hurts = world, ledger, hurts
        self._tickets: dict[str, Told] = {}
        """The latest from each prefill agent: they say where it is."""

    keys = count(1)

    async def one(self, random: Random) -> None:
        draw = draw_handoff(random, hurts=self._hurts)
        source = self._choose(random, "prefill", None)
        if source is None:
            await asyncio.sleep(0.1)
            return
        self._ledger.count("handoffs")
        await (self._handshake_remote if draw.is_met else self._hand_off)(draw, source, random)

    async def _hand_off(self, draw: Draw, source: Engine, random: Random) -> None:
        """The ticket comes with the offer, and the fetches after it."""
        key = next(self.keys)
        made = await self._made(key, source, source.ask(key, draw.order()), draw)
        if made is None:
            return
        readers = 2 if draw.kind == "second_reader" else 1
        fetches = [self._fetch(key, draw, made.ticket, source, random) for _ in range(readers)]
        await self._end(made, draw, fetches)

    async def _handshake_remote(self, draw: Draw, source: Engine, random: Random) -> None:
        """The fetch is given a name, and the offer the same; either may be the first."""
        key, ticket = next(self.keys), self._tickets.get(self._world.agent_of(source))
        if ticket is None:  # none has come from there, which would say where it is
            return
        meets = Rendezvous(uuid.uuid4().hex, ticket["endpoint"], ticket["server_key"])
        fetch = asyncio.create_task(self._fetch(key, draw, meets.to_json(), source, random))
        await asyncio.sleep(draw.act_after_s if draw.zero_tail else 0)
        asked = source.ask(key, {**draw.order(), "transfer_id": meets.transfer_id})
        made = await self._made(key, source, asked, draw)
        if made is None:
            await fetch
        else:
            await self._end(made, draw, [fetch])

    async def _end(self, made: Made, draw: Draw, fetching: Sequence[Awaitable[Told]]) -> None:
        source, key, about = made.source, made.key, {"offer_id": made.offer_id}
        fetches = [asyncio.ensure_future(one) for one in fetching]
        if draw.is_withdrawn:
            await asyncio.sleep(draw.act_after_s)
            source.tell({"do": "withdraw", "offer": key})
        ends = await asyncio.gather(*fetches)
        if "completed" not in [end["outcome"] for end in ends]:
            source.tell({"do": "withdraw", "offer": key})
        wait = Wait(source, f"offer {key}", draw.ttl_s + draw.queue_s + 2 * HOLD_S, about)
        over = await self._in_time(made.asked.ended, wait)
        self._ledger.count(f"offers_{over['outcome']}")
        if over["outcome"] == "parked" and "completed" in [end["outcome"] for end in ends]:
            self._ledger.count("parked_offers_read")
        if [end["outcome"] for end in ends].count("completed") > 1:
            self._ledger.violate("read_twice", f"offer {key} was completed by {ends}")

    async def _made(self, key: int, source: Engine, asked: Asked, draw: Draw) -> Made | None:
        wait = Wait(source, "an offer's reply", REPLY_S)
        made = await self._in_time(asked.made, wait)
        if "ticket" not in made:
            code = made.get("code") or "gone"
            self._ledger.codes[f"offer {code}"] += 1
            if code in NEVER:
                self._ledger.violate("odd_end", f"{draw.kind} offer: {made}")
            return None
        self._ledger.count("offers")
        ticket = self._tickets[self._world.agent_of(source)] = made["ticket"]
        if draw.kind == "altered":
            ticket = _altered(ticket)
        elif draw.is_forged:
            ticket = {**ticket, "secret": FORGED}
        return Made(key, source, asked, made["offer_id"], ticket)

    async def _fetch(
        self, offer: int, draw: Draw, ticket: Told, source: Engine, random: Random
    ) -> Told:
        target = self._choose(random, "decode", source.shape.model)
        if target is None:
            return {"outcome": "gone"}
        key = next(self.keys)
        order = fetch_order(
            offer,
            source.shape.spec,
            ticket,
            draw.num_tokens,
            first_token=draw.first_token,
            timeout_s=draw.timeout_s,
            zero_tail=draw.zero_tail,
            chunk_tokens=draw.piece_tokens,
            keep_s=draw.act_after_s,
            queue_s=draw.queue_s,
        )
        asked, asked_at = target.ask(key, order), time.monotonic()
        self._ledger.count("fetches")
        if draw.is_cancelled:
            await asyncio.sleep(draw.act_after_s)
            cancel = {"do": "cancel", "fetch": key, "release_offer": draw.releases}
            target.tell(cancel)
        what, about = f"fetch {key} of offer {offer}", {"fetch_id": order["fetch_id"]}
        wait = Wait(target, what, draw.queue_s + draw.timeout_s + ROOM_S, about)
        end = await self._in_time(asked.ended, wait)
        self._note_fetch(end, draw)
        late_s = time.monotonic() - asked_at - draw.queue_s
        is_lost = draw.is_held and end["code"] == "offer_expired"
        if is_lost and late_s < HELD_WITHIN_S and not self._hurts:
            self._ledger.violate("not_held", f"{what}, {draw}: {end}")
        if end.get("code") == "digest_mismatch" and "offer_id" in ticket:
            await self._judge_mismatch(what, ticket["offer_id"], source)
        await self._in_time(asked.freed, Wait(target, f"the blocks of {what}", FREE_S, about))
        return end

    def _note_fetch(self, end: Told, draw: Draw) -> None:
        outcome = end["outcome"]
        self._ledger.count(f"fetches_{outcome}")
        if outcome == "completed":
            self._ledger.paths[end["path"] or "nothing"] += 1
            self._ledger.count("bytes_compared", end["num_bytes"])
            self._ledger.count("held_fetches_completed", draw.is_held)
            if draw.is_forged:
                self._ledger.violate("forged", f"a forged ticket was good: {end}")
        else:
            self._ledger.codes[f"{end['stage']} {end['code']}"] += 1
            if end["code"] in NEVER or (end["code"] == "forbidden" and not draw.is_forged):
                self._ledger.violate("odd_end", f"{draw.kind}: {end}")

    async def _judge_mismatch(self, fetch: str, offer_id: str, source: Engine) -> None:
        """Bytes of an offer that has ended may differ; of one that lives on they may not."""
        history = await self._world.history(self._world.agent_of(source), offer_id=offer_id)
        if history and LIVE.search(history[-1]):
            self._ledger.violate(
                "false_mismatch", f"{fetch}, of an offer that lives", history=history
            )

    async def _in_time(self, future: "asyncio.Future[Told]", wait: Wait) -> Told:
        """The answer, which must come in time; nobody has time while it is stopped."""
        started, is_reported = time.monotonic(), False
        agent = self._world.agent_of(wait.engine)
        clocks = (wait.engine.stops, self._world.stops[agent], self._world.lag)
        while not future.done():
            await asyncio.wait([future], timeout=CHECK_S)
            lost_s = sum(clock.lost_s(started) for clock in clocks)
            late_s = time.monotonic() - started - lost_s - wait.within_s
            if not future.done() and late_s > OVERDUE_S and not is_reported:
                is_reported = True
                history = await self._world.history(agent, **wait.about) if wait.about else []
                of = f"{wait.what} at {wait.engine.shape.name}, {wait.within_s:.1f} s"
                self._ledger.violate("overdue", of, history=history)
            is_late = is_reported and late_s > 2 * OVERDUE_S
            if is_late or self._ledger.is_over:
                return {"outcome": "overdue", "code": "", "stage": "", "fetch_id": ""}
        return future.result()

    def _choose(self, random: Random, role: str, model: str | None) -> Engine | None:
        fit = [
            engine
            for engine in self._world.engines.values()
            if engine.shape.role == role
            and model in (None, engine.shape.model)
            and engine.up.is_set()
        ]
        return random.choice(fit) if fit else None


def _altered(ticket: Told) -> Told:
    """The ticket with its blocks in another order, as somebody on its way could make it."""
    if not ticket.get("blocks"):
        return ticket
    tables = msgpack.unpackb(base64.b64decode(ticket["blocks"]))
    for table in tables.values():
        ids = [table["ids"][at : at + 4] for at in range(0, len(table["ids"]), 4)]
        table["ids"] = b"".join(reversed(ids))
    return {**ticket, "blocks": base64.b64encode(msgpack.packb(tables)).decode()}
