"""``kvbus trace`` shows one request over both agents, on one clock, and where its time went."""

import json
import time
import uuid
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.engine import Link, RankMemory
from kvbus.geometry import BlockTable
from kvbus.protocol import MakeOffer, Rendezvous, StartFetch
from tests.support.agents import AgentProcess, until
from tests.support.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    ONE_BLOCK,
    begin,
    engine,
    failure_of,
    history_of,
    make_spec,
    pair,
)
from tests.support.memories import NHD

pytestmark = pytest.mark.anyio

ONE, OTHER = (f"00-{letter * 32}-{letter * 16}-01" for letter in "ab")
WAYS = {"sending"}
"""Spans between an engine and its agent, as the engine reports them."""
HOLD_S = 0.5
Spans = list[dict[str, Any]]


async def traced(*arguments: str) -> Any:
    return await anyio.to_thread.run_sync(CliRunner().invoke, app, ["trace", *arguments])


async def trace_of(name: str, *agents: AgentProcess | str) -> dict[str, Any]:
    peers = [agent if isinstance(agent, str) else agent.peer for agent in agents]
    result = await traced(name, *(part for peer in peers for part in ("--peer", peer)), "--json")
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer | {one["agent_id"]: one["spans"] for one in answer["agents"]}


def spans_of(answer: dict[str, Any], agent: AgentProcess) -> Spans:
    spans: Spans = answer[agent.settings["agent_id"]]
    return spans


def names(spans: Spans) -> list[str]:
    return [span["name"] for span in spans if span["name"] not in WAYS]


async def handed_off(
    prefill: AgentProcess, decode: AgentProcess, *, of_offer: str = "", of_fetch: str = ""
) -> str:
    name = uuid.uuid4().hex
    theirs, ours = {"full": BlockTable.of([1])}, {"full": BlockTable.of([2])}
    async with pair(prefill.attach, decode.attach) as (source, target):
        made = await source.control.connection.request(
            MakeOffer(name, 16, theirs, traceparent=of_offer)
        )
        fetch = StartFetch(f"fetch-{name}", made.ticket, 16, ours, traceparent=of_fetch)
        await target.control.connection.request(fetch)
        await until(lambda: decode.logged("handoff.completed", request_id=name))
    return name


async def test_one_decode_agent_leads_to_the_spans_of_both(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    """Also if two of its addresses are named; the engines have left."""
    name = await handed_off(prefill, decode)
    answer = await trace_of(name, decode, decode.peer.replace("127.0.0.1", "localhost"))
    assert names(spans_of(answer, prefill)) == ["offer", "sealed", "leased"]
    of_fetch = spans_of(answer, decode)
    assert names(of_fetch) == ["fetch", "resolving", "acquiring", "reading", "READ", "committing"]
    whole, *parts = [span for span in of_fetch if span["depth"] < 2]
    spent_s = sum(span["end_s"] - span["start_s"] for span in parts)
    assert spent_s == pytest.approx(whole["end_s"] - whole["start_s"], rel=0.03)
    assert sum(answer["shares_s"].values()) == pytest.approx(answer["total_s"])
    assert sorted(one["role"] for one in answer["agents"]) == ["decode", "prefill"]
    assert all("clock_error_s" in one for one in answer["agents"])


async def test_fetches_without_offers_are_not_mixed_up(
    prefill: AgentProcess, decode: AgentProcess, other_decode: AgentProcess
) -> None:
    async with engine(decode.attach) as one, engine(other_decode.attach) as other:
        fetches = [
            target.decode.fetch(
                Rendezvous(uuid.uuid4().hex, prefill.peer).to_json(), **ONE_BLOCK, timeout_s=0.3
            )
            for target in (one, other)
        ]
        for fetch in fetches:
            await failure_of(fetch)
    answer = await trace_of(fetches[0].fetch_id, decode, other_decode)
    assert names(spans_of(answer, decode))[0] == "fetch"
    assert other_decode.settings["agent_id"] not in answer


async def test_routers_request_name_finds_trace_of_rendezvous(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        ticket = Rendezvous(
            uuid.uuid4().hex, prefill.peer, request_id=f"routers-{uuid.uuid4().hex}"
        ).to_json()
        fetch = target.decode.fetch(ticket, num_tokens=32, block_ids={"full": [3, 4]}, timeout_s=60)
        await until(lambda: prefill.metric("awaited_offers") == 1)
        offer = await source.prefill.offer(
            "as the engine calls it",
            num_tokens=16,
            block_ids={"full": [1, 2]},
            sealed=False,
            transfer_id=ticket["transfer_id"],
        )
        await until(lambda: any("-> waiting" in line for line in history_of(target, fetch)))
        live = await trace_of(ticket["transfer_id"], prefill)
        await offer.extend(32)
        await offer.seal()
        await fetch.ended
        await offer.ended
    answer, same = [await trace_of(ticket[key], decode) for key in ("request_id", "transfer_id")]
    of_offer, of_fetch = spans_of(answer, prefill), spans_of(answer, decode)
    assert [names(spans_of(same, agent)) for agent in (prefill, decode)] == [
        names(of_offer),
        names(of_fetch),
    ]
    whole = [one for one in (*of_offer, *of_fetch) if one["name"] in ("offer", "fetch")]
    assert [one["attributes"]["offer_id"] for one in whole] == 2 * [offer.offer_id]
    assert not any(ticket["transfer_id"] in str(spans) for spans in (of_offer, of_fetch))
    assert names(of_offer)[:3] == ["awaited", "offer", "open"]
    stages = names([one for one in of_fetch if one["depth"] == 1])
    assert stages[0] == "awaiting"
    assert stages.count("reading") >= 2
    assert "waiting" in stages
    (alive,) = [one for one in spans_of(live, prefill) if one["name"] == "offer"]
    assert alive["attributes"]["offer_id"] == offer.offer_id


async def test_own_ids_find_offer_and_fetch_and_each_chunk_is_span(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        handoff = await begin(source, target, 48, chunk_tokens=16)
        await handoff.completed()
    by_offer = await trace_of(handoff.offer.offer_id, prefill)
    by_fetch = await trace_of(handoff.fetch.fetch_id, prefill, decode)
    assert len(by_offer["agents"]) == 1
    assert names(spans_of(by_fetch, prefill))[0] == "offer"
    assert names(spans_of(by_fetch, decode))[-7:] == [*(["reading", "READ"] * 3), "committing"]


async def test_trace_comes_with_ticket_unless_engine_names_another(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    for of_offer, of_fetch, expected in (
        (ONE, OTHER, [ONE, OTHER]),
        (ONE, "", [ONE, ONE]),
        (ONE, "wrong", [ONE, ONE]),
        ("wrong", OTHER, [None, OTHER]),
    ):
        name = await handed_off(prefill, decode, of_offer=of_offer, of_fetch=of_fetch)
        answer = await trace_of(name, decode)
        spans = [spans_of(answer, agent)[0] for agent in (prefill, decode)]
        assert [span["attributes"].get("traceparent") for span in spans] == expected


async def test_a_person_reads_a_waterfall_and_what_took_the_time(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    name = await handed_off(prefill, decode)
    result = await traced(name, "--peer", decode.peer)
    never = await traced("never", "--peer", decode.peer)
    silent = "tcp://127.0.0.1:9"
    half = await traced(name, "--peer", decode.peer, "--peer", silent, "--timeout", "0.5")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert any(line.split()[:1] == ["committing"] and "█" in line for line in lines)
    assert " ms: " in lines[-1]
    assert "%" in lines[-1]
    assert (never.exit_code, half.exit_code) == (1, 0)
    assert never.stderr.startswith("error: no agent remembers 'never': queried decode-")
    assert half.stderr.startswith(f"warning: {silent}: timeout: ")


async def test_a_fetch_that_failed_is_the_last_line(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("expired", **ONE_BLOCK, ttl_s=0.1)
        await offer.ended
        error = await failure_of(target.decode.fetch(offer.ticket, **ONE_BLOCK))
    result = await traced("expired", "--peer", decode.peer)
    answer = await trace_of("expired", decode)
    _, fetch = answer["agents"]
    (stage,) = [one["name"] for one in fetch["spans"] if one["error"] and one["depth"] == 1]
    share, last = result.stdout.splitlines()[-2:]
    assert " ms: " in share
    assert last.startswith("the fetch failed after ")
    assert last.endswith(f" ms ({stage}): {error.code}: {error.message}")
    assert result.stdout.count(error.message) == 1
    assert answer["verdict"].startswith("the fetch failed after ")


def parts(agent: AgentProcess, **asked: str) -> dict[str, dict[str, Any]]:
    spans = agent.trace(**asked)
    return {one["name"]: one for one in spans if one["depth"] == 1 and one["name"] != "leased"}


async def test_spans_of_large_handoff_lie_within_engines_measurement(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
    blocks: dict[str, Any] = {"num_tokens": num_tokens, "block_ids": {"full": [*range(512)]}}
    async with pair(
        prefill.attach, decode.attach, groups=(LARGE,), num_blocks=NUM_LARGE_BLOCKS
    ) as (source, target):
        offer = await source.prefill.offer("large", **blocks)
        began_at = time.monotonic()
        fetch = target.decode.fetch(offer.ticket, **blocks)
        await fetch.ended
        ended_at = time.monotonic()
        await offer.ended
    asked = (decode, {"fetch_id": fetch.fetch_id}), (prefill, {"offer_id": offer.offer_id})
    of_fetch, of_offer = (parts(agent, **which) for agent, which in asked)
    roots = [agent.trace(**which)[0] for agent, which in asked]
    assert began_at <= of_fetch["sending"]["start_s"]
    spent_s = sum(one["end_s"] - one["start_s"] for one in of_fetch.values())
    assert spent_s <= ended_at - began_at
    for spans, root in zip((of_fetch, of_offer), roots, strict=True):
        assert next(iter(spans)) == "sending"
        assert root["start_s"] == spans["sending"]["start_s"]
        assert root["end_s"] <= ended_at


def test_blocking_engine_asks_at_call_not_at_its_sessions_turn(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    specs = [make_spec(), make_spec()]
    held_until: list[float] = []

    def hold() -> None:
        time.sleep(HOLD_S)
        held_until.append(time.monotonic())

    memories = [RankMemory.allocate(spec, 0, NHD, num_blocks=4) for spec in specs]
    with (
        Link(prefill.attach, specs[0], memory=memories[0]) as source,
        Link(decode.attach, specs[1], memory=memories[1]) as target,
    ):
        offer = source.offer("blocking", num_tokens=16, block_ids={"full": [1]})
        ticket = offer.ticket
        target.runner.post(hold)
        began_at = time.monotonic()
        fetch = target.fetch(ticket, num_tokens=16, block_ids={"full": [2]})
        fetch.ended.wait()
    spans = parts(decode, fetch_id=fetch.fetch_id)
    assert began_at <= spans["sending"]["start_s"] < held_until[0] <= spans["sending"]["end_s"]
