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
    """The answer, a refusal included."""
    body = {"endpoint": prefill.peer, "decode_engine": target.spec.engine_id, **asked}
    return ask(decode.peer, "cost", body)


async def until_alone(decode: AgentProcess, prefill: AgentProcess, target: Engine) -> Any:
    """What it costs once no heartbeat is known that tells of reads."""
    await until(lambda: not cost(decode, prefill, target, num_tokens=64)["ok"]["queue_s"])
    return cost(decode, prefill, target, num_tokens=64)["ok"]


async def hand_off(source: Engine, target: Engine, num_tokens: int, number: int) -> float:
    """The seconds that the agent spent on one."""
    theirs, ours = source.some_blocks(1, num_tokens), target.some_blocks(2, num_tokens)
    offer = await source.prefill.offer(f"r{number}", num_tokens=num_tokens, block_ids=theirs)
    fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
    stages = (await fetch.completed()).stages_s
    await offer.released()
    return stages.queued + stages.claiming + stages.reading + stages.confirming


async def test_it_is_guessed_before_engines_have_met_and_learned_after(prefill, decode) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        guessed = cost(decode, prefill, target, num_tokens=100, first_token=20)["ok"]
        took_s = [await hand_off(source, target, 100, number) for number in range(10)]
        await until_alone(decode, prefill, target)
        known = cost(decode, prefill, target, num_tokens=100)["ok"]
        named = cost(decode, prefill, target, num_tokens=100, prefill_engine=source.spec.engine_id)[
            "ok"
        ]

    assert guessed["num_bytes"] == 80 * TOKEN_BYTES
    assert (guessed["path"], guessed["num_observed"]) == ("", 0)
    assert guessed.get("observed_s_ago") is None
    assert guessed["predicted_s"] > 0.1
    assert known["num_bytes"] == 100 * TOKEN_BYTES
    assert (known["path"], known["num_observed"]) == ("direct", 10)
    assert min(took_s) <= known["predicted_s"] <= max(took_s)
    assert named["num_observed"] == 10


async def test_questions_about_engines_that_are_not_there_change_nothing(prefill, decode) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        await hand_off(source, target, 64, 0)
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
        dealer.set(zmq.RCVTIMEO, 30_000)
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


async def test_fetches_that_are_under_way_make_it_longer_and_teach_nothing(prefill, decode) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        await hand_off(source, target, 64, 0)
        alone = await until_alone(decode, prefill, target)
        blocks = source.some_blocks(3, 160), target.some_blocks(4, 160)
        offer = await source.prefill.offer("slow", num_tokens=0, block_ids=blocks[0], sealed=False)
        fetch = target.decode.fetch(offer.ticket, num_tokens=160, block_ids=blocks[1])
        await until(lambda: decode.status()["counts"]["fetches"] == 1)
        beside = cost(decode, prefill, target, num_tokens=64)["ok"]
        await hand_off(source, target, 64, 1)
        await offer.extend(160)
        await offer.seal()
        await fetch.completed()
        await offer.released()
        after = await until_alone(decode, prefill, target)

    assert beside["queue_s"] > 0
    assert beside["predicted_s"] == pytest.approx(alone["predicted_s"] + beside["queue_s"])
    assert [one["num_observed"] for one in (alone, beside, after)] == [1, 1, 1]


async def test_of_two_side_by_side_neither_is_learned(prefill, decode) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        theirs, ours = source.some_blocks(3, 96)["full"], target.some_blocks(4, 96)["full"]
        offers = [
            await source.prefill.offer(name, num_tokens=48, block_ids={"full": theirs[part]})
            for name, part in (("a", slice(0, 3)), ("b", slice(3, 6)))
        ]
        fetches = [  # the first has to shake hands yet when the second comes
            target.decode.fetch(offer.ticket, num_tokens=48, block_ids={"full": ours[part]})
            for offer, part in zip(offers, (slice(0, 3), slice(3, 6)), strict=True)
        ]
        for offer, fetch in zip(offers, fetches, strict=True):
            await fetch.completed()
            await offer.released()

        assert cost(decode, prefill, target, num_tokens=48)["ok"]["num_observed"] == 0


async def test_reads_by_another_agent_make_it_longer_until_they_are_over(prefill, decode) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        await hand_off(source, target, 64, 0)
        offer = await source.prefill.offer(
            "theirs", num_tokens=64, block_ids=source.some_blocks(3, 64)
        )
        claim = {
            "agent_boot": offer.ticket["agent_boot"],
            "offer_id": offer.offer_id,
            "secret": offer.ticket["secret"],
            "reader_id": "another agent's",
            "lease_s": 60.0,
        }

        lease = ask(prefill.peer, "claim", claim)["ok"]
        await until(lambda: cost(decode, prefill, target, num_tokens=64)["ok"]["queue_s"] > 0)
        large = cost(decode, prefill, target, num_tokens=160)["ok"]["queue_s"]
        small = cost(decode, prefill, target, num_tokens=16)["ok"]["queue_s"]
        shown = {key: claim[key] for key in ("agent_boot", "offer_id")}
        given_back = ask(
            prefill.peer,
            "release",
            {**shown, "epoch": lease["epoch"], "token": lease["token"], "code": "aborted"},
        )
        await until_alone(decode, prefill, target)
        await offer.withdraw()

    assert "ok" in given_back
    assert large > small


async def test_an_engine_that_is_not_there_is_refused(prefill, decode) -> None:
    async with engine(DecodeSession, decode.attach) as target:
        unknown = cost(decode, prefill, target, num_tokens=1, decode_engine="nobody")
        behind = cost(decode, prefill, target, num_tokens=1, first_token=2)
        only = ask(decode.peer, "cost", {"endpoint": prefill.peer, "num_tokens": 16})
        async with engine(DecodeSession, decode.attach, make_spec()):
            two = ask(decode.peer, "cost", {"endpoint": prefill.peer, "num_tokens": 16})

    assert unknown["error"]["code"] == ErrorCode.ENGINE_UNKNOWN
    assert "first_token 2 is behind" in behind["error"]["message"]
    assert only["ok"]["decode_engine"] == target.spec.engine_id
    assert "2 engines are ready here" in two["error"]["message"]


async def test_what_became_of_it_is_an_event(prefill, decode) -> None:
    heard: list[Notice] = []

    class Listener(EventListener):
        def on_event(self, endpoint: str, event: Notice) -> None:
            heard.append(event)

        def on_heartbeat(self, endpoint: str, boot: str, reads: int) -> None:
            boots.append(boot)

    boots: list[str] = []
    with new_context() as context:
        subscriber = EventSubscriber(context, Listener(), topics=["cost.changed"])
        subscriber.add(decode.status()["events_endpoint"])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(subscriber.run)
            await until(lambda: boots)
            async with pair(prefill.attach, decode.attach) as (source, target):
                await hand_off(source, target, 100, 0)
                await until(lambda: heard)
            tasks.cancel_scope.cancel()

    assert heard[0].body["endpoint"] == prefill.peer
    assert heard[0].body["prefill_engine"] == source.spec.engine_id
    assert heard[0].body["decode_engine"] == target.spec.engine_id
    assert heard[0].body["token_bytes"] == TOKEN_BYTES
    assert heard[0].body["fixed_s"] > 0


async def test_the_http_port_says_the_same_and_names_what_is_wrong(prefill, decode) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        await hand_off(source, target, 64, 0)
        said = cost(decode, prefill, target, num_tokens=64)["ok"]
        query = f"endpoint={prefill.peer}&decode_engine={target.spec.engine_id}"
        status, text = decode.page(f"/cost?{query}&num_tokens=64")
        wrong = decode.page(f"/cost?{query}&num_tokens=many")
        none = prefill.page(f"/cost?{query}&num_tokens=64")

    told = json.loads(text)
    assert status == 200
    assert told.pop("observed_s_ago") >= said.pop("observed_s_ago")
    assert told == said
    assert (wrong[0], "num_tokens" in wrong[1]) == (400, True)
    assert (none[0], "decode agents" in none[1]) == (400, True)
