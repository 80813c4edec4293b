"""What a handoff would cost is asked of the decode agent, which learns from those that ended."""

import json
import uuid
from typing import Any

import anyio
import msgpack
import pytest
import zmq

from kvbus.bus import EventListener, EventSubscriber, new_context
from kvbus.engine import DecodeSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Notice
from tests.agents import AgentProcess, until
from tests.engines import Engine, engine, make_spec, pair
from tests.plain_sockets import ask

pytestmark = pytest.mark.anyio

TOKEN_BYTES = 2 * 2 * 6 * 8 * 2


def cost(decode: AgentProcess, prefill: AgentProcess, target: Engine, **asked: Any) -> Any:
    """The answer, or the refusal."""
    body = {"endpoint": prefill.peer, "decode_engine": target.spec.engine_id, **asked}
    answer = ask(decode.peer, "cost", body)
    return answer["ok"] if "ok" in answer else answer["error"]


async def until_alone(decode: AgentProcess, prefill: AgentProcess, target: Engine) -> Any:
    """What it costs once no heartbeat is known that tells of reads."""
    await until(lambda: not cost(decode, prefill, target, num_tokens=64)["queue_s"])
    return cost(decode, prefill, target, num_tokens=64)


async def hand_off(source: Engine, target: Engine, num_tokens: int) -> float:
    """The seconds that the agent spent on one."""
    theirs, ours = source.some_blocks(1, num_tokens), target.some_blocks(2, num_tokens)
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=num_tokens, block_ids=theirs)
    fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
    stages = (await fetch.completed()).stages_s
    await offer.released()
    return stages.queued + stages.claiming + stages.reading + stages.confirming


class Heard(EventListener):
    """The events, and the boot ids of agents whose heart was heard."""

    def __init__(self) -> None:
        self.events: list[Notice] = []
        self.boots: list[str] = []

    def on_event(self, endpoint: str, event: Notice) -> None:
        self.events.append(event)

    def on_heartbeat(self, endpoint: str, boot: str, reads: int) -> None:
        self.boots.append(boot)


async def test_it_is_guessed_before_engines_have_met_and_learned_and_told_of_after(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    heard = Heard()
    with new_context() as context:
        subscriber = EventSubscriber(context, heard, topics=["cost.changed"])
        subscriber.add(decode.status()["events_endpoint"])
        async with (
            anyio.create_task_group() as tasks,
            pair(prefill.attach, decode.attach) as (source, target),
        ):
            tasks.start_soon(subscriber.run)
            await until(lambda: heard.boots)
            guessed = cost(decode, prefill, target, num_tokens=100, first_token=20)
            took_s = [await hand_off(source, target, 100) for _ in range(10)]
            await until_alone(decode, prefill, target)
            theirs = {"prefill_engine": source.spec.engine_id}
            known = cost(decode, prefill, target, num_tokens=100)
            named = cost(decode, prefill, target, num_tokens=100, **theirs)
            query = f"endpoint={prefill.peer}&decode_engine={target.spec.engine_id}"
            status, page = decode.page(f"/cost?{query}&num_tokens=100")
            wrong = decode.page(f"/cost?{query}&num_tokens=many")
            none = prefill.page(f"/cost?{query}&num_tokens=64")
            await until(lambda: heard.events)
            tasks.cancel_scope.cancel()

    assert guessed["num_bytes"] == 80 * TOKEN_BYTES
    assert (guessed["path"], guessed["num_observed"]) == ("", 0)
    assert guessed.get("observed_s_ago") is None
    assert guessed["predicted_s"] > 0
    assert known["num_bytes"] == 100 * TOKEN_BYTES
    assert (known["path"], known["num_observed"]) == ("direct", 10)
    assert min(took_s) <= known["predicted_s"] <= max(took_s)
    assert named["num_observed"] == 10
    told = json.loads(page)
    assert status == 200
    assert told.pop("observed_s_ago") >= known.pop("observed_s_ago")
    assert told == known
    assert (wrong[0], "num_tokens" in wrong[1]) == (400, True)
    assert (none[0], "decode agents" in none[1]) == (400, True)
    event = heard.events[0].body
    assert event["endpoint"] == prefill.peer
    assert event["prefill_engine"] == source.spec.engine_id
    assert event["decode_engine"] == target.spec.engine_id
    assert event["token_bytes"] == TOKEN_BYTES
    assert event["fixed_s"] > 0


async def test_questions_about_engines_that_are_not_there_change_nothing(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        await hand_off(source, target, 64)
        before = await until_alone(decode, prefill, target)
        await anyio.to_thread.run_sync(ask_of_strangers, decode, target)
        after = await until_alone(decode, prefill, target)

    assert before["num_observed"] == 1
    for changes in ("observed_s_ago", "queue_s"):
        del before[changes], after[changes]
    assert after == before


def ask_of_strangers(decode: AgentProcess, target: Engine) -> None:
    """More pairs than an agent remembers, a few questions at a time."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVTIMEO, 60_000)
        dealer.connect(decode.peer)
        boot, engine_id = uuid.uuid4().hex, target.spec.engine_id
        for first in range(1, 4200, 20):
            for number in range(first, first + 20):
                body = {
                    "endpoint": f"tcp://127.0.0.1:{number}",
                    "decode_engine": engine_id,
                    "num_tokens": 64,
                }
                fields = {"v": 1, "op": "cost", "id": number, "boot": boot, "body": body}
                dealer.send(msgpack.packb(fields))
            for _ in range(20):
                assert "ok" in msgpack.unpackb(dealer.recv())


async def test_fetches_that_are_under_way_make_it_longer_and_teach_nothing(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        await hand_off(source, target, 64)
        alone = await until_alone(decode, prefill, target)
        blocks = source.some_blocks(3, 160), target.some_blocks(4, 160)
        offer = await source.prefill.offer("slow", num_tokens=0, block_ids=blocks[0], sealed=False)
        fetch = target.decode.fetch(offer.ticket, num_tokens=160, block_ids=blocks[1])
        await until(lambda: decode.status()["counts"]["fetches"] == 1)
        beside = cost(decode, prefill, target, num_tokens=64)
        await hand_off(source, target, 64)
        await offer.extend(160)
        await offer.seal()
        await fetch.completed()
        await offer.released()
        after = await until_alone(decode, prefill, target)

    assert beside["queue_s"] > 0
    assert beside["predicted_s"] == pytest.approx(alone["predicted_s"] + beside["queue_s"])
    assert [one["num_observed"] for one in (alone, beside, after)] == [1, 1, 1]


async def test_reads_by_another_agent_make_it_longer_until_they_are_over(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        await hand_off(source, target, 64)
        offer = await source.prefill.offer(
            "theirs", num_tokens=64, block_ids=source.some_blocks(3, 64)
        )
        shown = {"agent_boot": offer.ticket["agent_boot"], "offer_id": offer.offer_id}
        claim = {"secret": offer.ticket["secret"], "reader_id": "another agent's", "lease_s": 60.0}

        lease = ask(prefill.peer, "claim", {**shown, **claim})["ok"]
        await until(lambda: cost(decode, prefill, target, num_tokens=64)["queue_s"] > 0)
        large, small = (
            cost(decode, prefill, target, num_tokens=num)["queue_s"] for num in (160, 16)
        )
        right = {"epoch": lease["epoch"], "token": lease["token"], "code": "aborted"}
        given_back = ask(prefill.peer, "release", {**shown, **right})
        await until_alone(decode, prefill, target)
        await offer.withdraw()

    assert "ok" in given_back
    assert large > small


async def test_an_engine_that_is_not_there_is_refused(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with engine(DecodeSession, decode.attach) as target:
        unknown = cost(decode, prefill, target, num_tokens=1, decode_engine="nobody")
        behind = cost(decode, prefill, target, num_tokens=1, first_token=2)
        only = ask(decode.peer, "cost", {"endpoint": prefill.peer, "num_tokens": 16})
        async with engine(DecodeSession, decode.attach, make_spec()):
            two = ask(decode.peer, "cost", {"endpoint": prefill.peer, "num_tokens": 16})

    assert unknown["code"] == ErrorCode.ENGINE_UNKNOWN
    assert "first_token 2 is behind" in behind["message"]
    assert only["ok"]["decode_engine"] == target.spec.engine_id
    assert "2 engines are ready here" in two["error"]["message"]
