"""The handoffs of a chaos run: what is offered and fetched, by whom, and what becomes of it.

Each is drawn: plain ones, large ones that are withdrawn or cancelled under the read, second
readers, offers that grow, that live for milliseconds only, tickets that were altered.
"""

import asyncio
import base64
import re
import time
import uuid
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import msgpack

from tests.chaos.engines import Asked, Engine, Told
from tests.chaos.ledger import Ledger
from tests.chaos.shapes import LARGE_TOKENS
from tests.chaos.world import World
from tests.security.listening import FORGED

KINDS = {
    "plain": 30,
    "large": 8,
    "withdrawn": 16,
    "cancelled": 14,
    "second_reader": 6,
    "short_lived": 5,
    "growing": 9,
    "altered": 12,
    "forged": 2,
    "partial": 5,
}
SMALL_TOKENS, LARGE = (2, 300), (LARGE_TOKENS // 2, LARGE_TOKENS)
TOKENS = {"large": LARGE, "withdrawn": LARGE, "cancelled": LARGE, "altered": (33, 80)}
"""Altered tickets have more than one block, and so few that they are read without a claim."""
OVERDUE_S = 5.0
ROOM_S = 2.0
HOLD_S = 20.0
"""The longest that one reader may keep an offer (`max_hold_s`)."""
REPLY_S, FREE_S = 40.0, 60.0
LOOK_S = 0.5
SOONEST_S, LATEST_S = 0.002, 1.0
"""After so long a handoff is withdrawn or cancelled: a read is met on slow machines and fast."""
NEVER = ("invalid", "internal")
"""Codes that say that somebody made a mistake."""
EXCUSED = ("lost", "silent")
LIVE = re.compile(" -> (open|sealed): ")
"""The state of an offer in a line of its story."""


@dataclass(frozen=True)
class Draw:
    """What one handoff is to be."""

    kind: str
    num_tokens: int
    first_token: int
    ttl_s: float
    timeout_s: float
    act_after_s: float
    releases: bool
    zero_tail: bool
    piece_tokens: int
    steps: tuple[int, ...]


def draw_handoff(random: Random) -> Draw:
    """By weight, then by the ranges of its kind."""
    (kind,) = random.choices(list(KINDS), list(KINDS.values()))
    tokens = random.randint(*TOKENS.get(kind, SMALL_TOKENS))
    steps = (tokens,)
    if kind == "growing":
        steps = (*sorted(random.sample(range(1, tokens), min(3, tokens - 1))), tokens)
    return Draw(
        kind=kind,
        num_tokens=tokens,
        first_token=random.randrange(tokens) if kind == "partial" else 0,
        ttl_s=random.uniform(0.001, 0.2) if kind == "short_lived" else random.uniform(4.0, 10.0),
        timeout_s=random.choice([3.0, 6.0, 10.0]),
        act_after_s=SOONEST_S * (LATEST_S / SOONEST_S) ** random.random(),
        releases=random.random() < 0.5,
        zero_tail=random.random() < 0.3,
        piece_tokens=random.choice([0, 0, 128]),
        steps=steps,
    )


@dataclass(frozen=True)
class Wait:
    """What must come from whom, ``within_s``; ``about`` is what its agent is asked when late."""

    engine: Engine
    what: str
    within_s: float
    kind: str
    about: dict[str, str] = field(default_factory=dict)


class Handoffs:
    """Makes handoffs in a world, and judges how they end."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._world, self._ledger = world, ledger

    keys = count(1)

    async def one(self, random: Random) -> None:
        """One handoff, from its offer until nothing of it is left."""
        draw, source = draw_handoff(random), self._choose(random, "prefill", None)
        if source is None:
            await asyncio.sleep(0.1)
            return
        key = next(self.keys)
        self._ledger.count("handoffs")
        order = {"do": "offer", "steps": draw.steps, "ttl_s": draw.ttl_s}
        offer = await self._made(source, source.ask(key, order), draw)
        if offer is None:
            return
        readers = 2 if draw.kind == "second_reader" else 1
        fetches = [
            asyncio.create_task(self._fetch(key, draw, offer["made"]["ticket"], source, random))
            for _ in range(readers)
        ]
        if draw.kind == "withdrawn":
            await asyncio.sleep(draw.act_after_s)
            source.tell({"do": "withdraw", "offer": key})
        ends = await asyncio.gather(*fetches)
        if "completed" not in [end["outcome"] for end in ends]:
            source.tell({"do": "withdraw", "offer": key})
        offer_id = offer["made"]["offer_id"]
        about = {"offer_id": offer_id}
        wait = Wait(source, f"offer {key}", draw.ttl_s + 2 * HOLD_S, "offer", about)
        over = await self._in_time(offer["asked"].ended, wait)
        await self._judge(key, draw, over, ends, source=source, offer_id=offer_id)

    async def _made(self, source: Engine, asked: Asked, draw: Draw) -> dict[str, Any] | None:
        wait = Wait(source, "an offer's reply", REPLY_S, "reply")
        made = await self._in_time(asked.made, wait)
        if "ticket" not in made:
            self._ledger.codes[f"offer {made.get('code') or 'gone'}"] += 1
            return None
        self._ledger.count("offers")
        if draw.kind == "altered":
            made = {**made, "ticket": _altered(made["ticket"])}
        elif draw.kind == "forged":
            made = {**made, "ticket": {**made["ticket"], "secret": FORGED}}
        return {"made": made, "asked": asked}

    async def _fetch(
        self, offer: int, draw: Draw, ticket: Told, source: Engine, random: Random
    ) -> Told:
        """One fetch until its blocks are free."""
        target = self._choose(random, "decode", source.shape.model)
        if target is None:
            return {"outcome": "gone"}
        key, started = next(self.keys), time.monotonic()
        order = {
            "do": "fetch",
            "offer": offer,
            "ticket": ticket,
            "num_tokens": draw.num_tokens,
            "first_token": draw.first_token,
            "timeout_s": draw.timeout_s,
            "zero_tail": draw.zero_tail,
            "piece_tokens": draw.piece_tokens,
            "hold_s": draw.act_after_s,
            "fetch_id": uuid.uuid4().hex,
        }
        asked = target.ask(key, order)
        self._ledger.count("fetches")
        if draw.kind == "cancelled":
            await asyncio.sleep(draw.act_after_s)
            cancel = {"do": "cancel", "fetch": key, "release_offer": draw.releases}
            target.tell(cancel)
        what, about = f"fetch {key} of offer {offer}", {"fetch_id": order["fetch_id"]}
        wait = Wait(target, what, draw.timeout_s + ROOM_S, "fetch", about)
        end = await self._in_time(asked.ended, wait)
        self._note_fetch(end, draw)
        if end.get("code") == "digest_mismatch":
            await self._judge_mismatch(what, ticket["offer_id"], source)
        ended = time.monotonic()
        wait = Wait(target, f"the blocks of {what}", FREE_S, "blocks", about)
        await self._in_time(asked.freed, wait)
        self._ledger.note_longest("quarantine", time.monotonic() - ended)
        return {**end, "agent": self._world.agent_of(target), "took_s": ended - started}

    def _note_fetch(self, end: Told, draw: Draw) -> None:
        outcome = end["outcome"]
        self._ledger.count(f"fetches_{outcome}")
        if outcome == "completed":
            self._ledger.paths[end["path"] or "nothing"] += 1
            self._ledger.count("bytes_compared", end["num_bytes"])
            if draw.kind == "forged":
                self._ledger.violate("forged", f"a forged ticket was good: {end}")
        else:
            self._ledger.codes[f"{end['stage']} {end['code']}"] += 1
            if end["code"] in NEVER or (end["code"] == "forbidden" and draw.kind != "forged"):
                self._ledger.violate("odd_end", f"{draw.kind}: {end}")

    async def _judge_mismatch(self, fetch: str, offer_id: str, source: Engine) -> None:
        """Bytes of an offer that has ended may differ; of one that lives on they may not."""
        story = await self._world.story(self._world.agent_of(source), offer_id=offer_id)
        if story and LIVE.search(story[-1]):
            self._ledger.violate("false_mismatch", f"{fetch}, of an offer that lives", story=story)

    async def _judge(
        self, key: int, draw: Draw, over: Told, ends: list[Told], *, source: Engine, offer_id: str
    ) -> None:
        """Compare how an offer ended with how its fetches did."""
        self._ledger.count(f"offers_{over['outcome']}")
        num_completed = [end["outcome"] for end in ends].count("completed")
        if num_completed > 1:
            self._ledger.violate("read_twice", f"offer {key} was completed by {ends}")
        if over["outcome"] != "completed" or num_completed or draw.kind == "cancelled":
            return
        if any(end["outcome"] == "gone" or end.get("stage") in EXCUSED for end in ends):
            self._ledger.count("consumed_by_the_dead")
            return
        places = [self._world.agent_of(source), *(end["agent"] for end in ends)]
        since = time.monotonic() - max(end["took_s"] for end in ends) - HOLD_S
        if any(self._world.faults[place].lost_s(since) for place in places):
            self._ledger.count("consumed_while_cut")
            return
        self._ledger.count("consumed_without_fetch")
        stories = [await self._world.story(self._world.agent_of(source), offer_id=offer_id)]
        for end in ends:
            stories.append(await self._world.story(end["agent"], fetch_id=end["fetch_id"]))
        self._ledger.consumed.append({"offer": key, "kind": draw.kind, "stories": stories})

    async def _in_time(self, future: "asyncio.Future[Told]", wait: Wait) -> Told:
        """The answer, which must come in time; nobody has time while it is stopped."""
        started, is_told = time.monotonic(), False
        agent = self._world.agent_of(wait.engine)
        clocks = (wait.engine.stops, self._world.stops[agent], self._world.lag)
        while not future.done():
            await asyncio.wait([future], timeout=LOOK_S)
            lost_s = sum(clock.lost_s(started) for clock in clocks)
            late_s = time.monotonic() - started - lost_s - wait.within_s
            self._ledger.note_longest("late", late_s)
            if not future.done() and late_s > OVERDUE_S and not is_told:
                is_told = True
                story = await self._world.story(agent, **wait.about) if wait.about else []
                of = f"{wait.what} at {wait.engine.shape.name}, {wait.within_s:.1f} s"
                self._ledger.violate("overdue", of, story=story)
            is_late = is_told and late_s > 2 * OVERDUE_S
            if is_late or self._ledger.is_over:
                return {"outcome": "overdue", "code": "", "stage": "", "fetch_id": ""}
        self._ledger.note_longest(wait.kind, time.monotonic() - started)
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
