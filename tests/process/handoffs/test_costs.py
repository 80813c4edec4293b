"""What a handoff would cost is asked of the decode agent, which learns from those that ended."""

import json
import uuid
from typing import Any

import anyio
import msgpack
import pytest
import zmq

from kvbus.errors import ErrorCode
from tests.support.agents import AgentProcess, Agents
from tests.support.engines import Engine, engine, hand_over, make_spec, pair
from tests.support.plain_sockets import ask

pytestmark = pytest.mark.anyio

TOKEN_BYTES = 2 * 2 * 6 * 8 * 2


def cost(decode: AgentProcess, prefill: AgentProcess, target: Engine, **asked: Any) -> Any:
    """The answer, or the refusal, for 64 tokens unless told otherwise."""
    body = {"endpoint": prefill.peer, "decode_engine": target.spec.engine_id, "num_tokens": 64}
    answer = ask(decode.peer, "cost", body | asked)
    return answer["ok"] if "ok" in answer else answer["error"]


async def test_it_is_guessed_before_engines_have_met_and_learned_after(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode", mapped=False)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        guessed = cost(decode, prefill, target, num_tokens=100, first_token=20)
        stages = [(await hand_over(source, target, 64)).stages_s for _ in range(10)]
        known = cost(decode, prefill, target)
        query = f"/cost?endpoint={prefill.peer}&decode_engine={target.spec.engine_id}"
        pages = [decode.page(f"{query}&num_tokens={number}") for number in ("64", "many")]
        await anyio.to_thread.run_sync(ask_of_strangers, decode, target)
        later = cost(decode, prefill, target)

    took_s = [one.queued + one.acquiring + one.reading + one.committing for one in stages]
    assert guessed["num_bytes"] == 80 * TOKEN_BYTES
    assert (guessed["path"], guessed["num_observed"]) == ("", 0)
    assert guessed["predicted_s"] > 0
    assert (known["path"], known["num_observed"]) == ("direct", 10)
    assert min(took_s) <= known["predicted_s"] <= max(took_s)
    assert [status for status, _ in pages] == [200, 400]
    assert json.loads(pages[0][1]) == known
    assert later == known, "questions about agents that are not there change nothing"


def ask_of_strangers(decode: AgentProcess, target: Engine) -> None:
    """More pairs than an agent remembers, a few questions at a time."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVTIMEO, 60_000)
        dealer.connect(decode.peer)
        boot, engine_id = uuid.uuid4().hex, target.spec.engine_id
        for first in range(1, 4200, 20):
            for number in range(first, first + 20):
                stranger = f"tcp://127.0.0.1:{number}"
                body = {"endpoint": stranger, "decode_engine": engine_id, "num_tokens": 64}
                fields = {"v": 1, "op": "cost", "id": number, "boot": boot, "body": body}
                dealer.send(msgpack.packb(fields))
            for _ in range(20):
                assert "ok" in msgpack.unpackb(dealer.recv())


async def test_unknown_engine_or_one_of_several_is_refused(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with engine(decode.attach) as target:
        unknown = cost(decode, prefill, target, decode_engine="nobody")
        behind = cost(decode, prefill, target, first_token=65)
        async with engine(decode.attach, make_spec()):
            several = ask(decode.peer, "cost", {"endpoint": prefill.peer, "num_tokens": 16})

    assert unknown["code"] == ErrorCode.ENGINE_UNKNOWN
    assert "first_token 65 is behind" in behind["message"]
    assert "2 engines are ready here" in several["error"]["message"]
