"""``kvbus trace`` shows one request over both agents, on one clock, and where its time went."""

import json
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.engine import DecodeSession
from kvbus.geometry import BlockTable
from kvbus.protocol import MakeOffer, Rendezvous, StartFetch
from kvbus.table import ASKED, TELLING
from tests.agents import until
from tests.e2e.shapes import Side, two_engines
from tests.engines import engine, failure_of, pair

pytestmark = pytest.mark.anyio

ONE, OTHER = (f"00-{letter * 32}-{letter * 16}-01" for letter in "ab")


async def traced(*arguments: str) -> Result:
    """The command runs an event loop of its own."""
    return await anyio.to_thread.run_sync(CliRunner().invoke, app, ["trace", *arguments])


async def told(*arguments: str) -> dict[str, Any]:
    """By agent id, its spans; and all else that the command says in JSON."""
    result = await traced(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer | {one["agent_id"]: one["spans"] for one in answer["agents"]}


def names(spans: list[dict[str, Any]]) -> list[str]:
    """Without the ways between engine and agent: `test_trace_ways` is about them."""
    return [span["name"] for span in spans if span["name"] not in (ASKED, TELLING)]


def states(decode, fetch) -> str:
    story = decode.status(fetch_id=fetch.fetch_id)["story"]
    return " ".join(line.partition("-> ")[2].split(":")[0].upper() for line in story)


async def handed_off(prefill, decode, request_id):
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer(request_id, num_tokens=16, block_ids={"full": [1]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        await fetch.completed()
        await offer.released()
    return offer, fetch


async def test_one_decode_agent_leads_to_the_spans_of_both(prefill, decode):
    await handed_off(prefill, decode, "whole")

    answer = await told("whole", "--peer", decode.peer)

    assert names(answer[prefill.settings["agent_id"]]) == ["offer", "sealed", "leased"]
    of_fetch = answer[decode.settings["agent_id"]]
    assert names(of_fetch) == ["fetch", "resolving", "claiming", "reading", "READ", "confirming"]
    whole, *parts = [span for span in of_fetch if span["depth"] < 2]
    spent_s = sum(span["end_s"] - span["start_s"] for span in parts)
    assert spent_s == pytest.approx(whole["end_s"] - whole["start_s"], rel=0.03)
    assert sum(answer["shares_s"].values()) == pytest.approx(answer["total_s"])
    assert all(one["clock_error_s"] < 0.1 for one in answer["agents"])


async def test_fetches_whose_offer_is_not_met_are_not_those_of_each_other(
    prefill, decode, other_decode
):
    """Without an id of its request such a fetch has the name of all of them."""
    async with (
        engine(DecodeSession, decode.attach) as one,
        engine(DecodeSession, other_decode.attach) as other,
    ):
        fetches = [
            target.decode.fetch(
                Rendezvous(uuid.uuid4().hex, prefill.peer).to_json(),
                num_tokens=16,
                block_ids={"full": [1]},
                timeout_s=0.3,
            )
            for target in (one, other)
        ]
        for fetch in fetches:
            await failure_of(fetch)

    peers = "--peer", decode.peer, "--peer", other_decode.peer
    answer = await told(fetches[0].fetch_id, *peers)

    assert names(answer[decode.settings["agent_id"]])[0] == "fetch"
    assert other_decode.settings["agent_id"] not in answer


async def test_an_agent_that_is_asked_at_two_of_its_addresses_is_one(prefill, decode):
    await handed_off(prefill, decode, "twice")
    elsewhere = decode.peer.replace("127.0.0.1", "localhost")

    answer = await told("twice", "--peer", decode.peer, "--peer", elsewhere)

    assert sorted(one["role"] for one in answer["agents"]) == ["decode", "prefill"]


async def test_what_is_gathered_and_scattered_is_told_by_both(shapes):
    decode = shapes.decode["packed"]
    async with two_engines(shapes, "packed", Side(tp=2), Side(tp=3), max_tokens=64) as engines:
        source, target = engines
        blocks = source.some_blocks(1, 64), target.some_blocks(2, 64)
        offer = await source.prefill.offer("in boxes", num_tokens=64, block_ids=blocks[0])
        fetch = target.decode.fetch(offer.ticket, num_tokens=64, block_ids=blocks[1])
        await fetch.completed()
        await offer.released()

    answer = await told("in boxes", "--peer", decode.peer)

    of_offer = answer[shapes.prefill.settings["agent_id"]]
    of_fetch = answer[decode.settings["agent_id"]]
    assert {"leased", "gathering", "packed"} <= set(names(of_offer))
    assert {"packing", "READ", "scattering"} <= set(names(of_fetch))
    assert all(span["about"] for span in of_offer if span["name"] == "gathering")


async def test_who_waits_for_an_offer_and_for_tokens_says_so(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = Rendezvous(uuid.uuid4().hex, prefill.peer).to_json()
        tables = {"full": [1, 2]}, {"full": [3, 4]}
        fetch = target.decode.fetch(meets, num_tokens=32, block_ids=tables[1], timeout_s=30)
        await until(lambda: prefill.metric("awaited_offers") == 1)
        offer = await source.prefill.offer(
            "grows",
            num_tokens=16,
            block_ids=tables[0],
            sealed=False,
            transfer_id=meets["transfer_id"],
        )
        await until(lambda: "WAITING" in states(decode, fetch))
        await offer.extend(32)
        await offer.seal()
        await fetch.completed()
        await offer.released()

    answer = await told("grows", "--peer", decode.peer)

    of_offer = answer[prefill.settings["agent_id"]]
    stages = names([one for one in answer[decode.settings["agent_id"]] if one["depth"] == 1])
    assert names(of_offer)[:3] == ["awaited", "offer", "open"]
    assert stages[0] == "meeting"
    assert stages.count("reading") >= 2
    assert "waiting" in stages


@pytest.mark.parametrize("name", ["request_id", "transfer_id"])
async def test_what_a_router_called_a_request_finds_it_when_its_offer_was_met(
    prefill, decode, name
):
    async with pair(prefill.attach, decode.attach) as (source, target):
        meets = Rendezvous(
            uuid.uuid4().hex, prefill.peer, request_id=f"routers-{uuid.uuid4().hex}"
        ).to_json()
        offer = await source.prefill.offer(
            "as the engine calls it",
            num_tokens=16,
            block_ids={"full": [1]},
            transfer_id=meets["transfer_id"],
        )
        fetch = target.decode.fetch(meets, num_tokens=16, block_ids={"full": [2]})
        await fetch.completed()
        await offer.released()

    answer = await told(meets[name], "--peer", decode.peer)

    by_role = {one["role"]: one["spans"] for one in answer["agents"]}
    ids = [span["attributes"]["offer_id"] for role in by_role.values() for span in role[:1]]
    assert by_role.keys() == {"prefill", "decode"}
    assert ids == 2 * [offer.offer_id]
    assert not any(meets["transfer_id"] in str(spans) for spans in by_role.values())


async def test_a_prefill_agent_finds_an_offer_by_its_transfer_id(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, _):
        name = uuid.uuid4().hex
        offer = await source.prefill.offer(
            "r", num_tokens=16, block_ids={"full": [1]}, transfer_id=name
        )
        live = await told(name, "--peer", prefill.peer)
        await offer.withdraw()
        await offer.released()
        over = await told(name, "--peer", prefill.peer)

    for answer in live, over:
        (spans,) = (one["spans"] for one in answer["agents"])
        assert {span["attributes"]["offer_id"] for span in spans if span["name"] == "offer"} == {
            offer.offer_id
        }


async def test_each_chunk_of_a_fetch_is_a_span(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        tables = {"full": [1, 2, 3]}, {"full": [4, 5, 6]}
        offer = await source.prefill.offer("chunks", num_tokens=48, block_ids=tables[0])
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=48, block_ids=tables[1], piece_tokens=16
        )
        await fetch.completed()
        await offer.released()

    answer = await told("chunks", "--peer", decode.peer)

    of_fetch = names(answer[decode.settings["agent_id"]])
    assert of_fetch[-7:] == [*(["reading", "READ"] * 3), "confirming"]


@pytest.mark.parametrize(
    ("of_offer", "of_fetch", "expected"),
    [
        (ONE, OTHER, (ONE, OTHER)),
        (ONE, "", (ONE, ONE)),
        (ONE, "wrong", (ONE, ONE)),
        ("wrong", OTHER, (None, OTHER)),
    ],
)
async def test_the_trace_comes_with_the_ticket_unless_the_engine_says_another(
    prefill, decode, of_offer, of_fetch, expected
):
    """Plain messages, as the SDK sends no wrong ones."""
    name = uuid.uuid4().hex
    async with pair(prefill.attach, decode.attach) as (source, target):
        tables = {"full": BlockTable.of([1])}, {"full": BlockTable.of([2])}
        made = await source.prefill.request(MakeOffer(name, 16, tables[0], traceparent=of_offer))
        await target.decode.request(
            StartFetch(f"fetch-{name}", made.ticket, 16, tables[1], traceparent=of_fetch)
        )
        await until(lambda: decode.logged("handoff.completed", request_id=name))

    answer = await told(name, "--peer", decode.peer)

    spans = [answer[agent.settings["agent_id"]][0] for agent in (prefill, decode)]
    assert tuple(span["attributes"].get("traceparent") for span in spans) == expected


async def test_the_sdk_passes_a_trace_on(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer(
            "traced", num_tokens=16, block_ids={"full": [1]}, traceparent=ONE
        )
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=16, block_ids={"full": [2]}, traceparent=OTHER
        )
        await fetch.completed()

    answer = await told("traced", "--peer", decode.peer)

    spans = [answer[agent.settings["agent_id"]][0] for agent in (prefill, decode)]
    assert [span["attributes"]["traceparent"] for span in spans] == [ONE, OTHER]


async def test_an_offer_and_a_fetch_are_found_by_their_own_ids(prefill, decode):
    offer, fetch = await handed_off(prefill, decode, "by id")

    by_offer = await told(offer.offer_id, "--peer", prefill.peer)
    by_fetch = await told(fetch.fetch_id, "--peer", prefill.peer, "--peer", decode.peer)

    assert len(by_offer["agents"]) == 1
    assert names(by_fetch[prefill.settings["agent_id"]])[0] == "offer"
    assert names(by_fetch[decode.settings["agent_id"]])[0] == "fetch"


async def test_a_person_reads_a_waterfall_and_what_took_the_time(prefill, decode, tmp_path):
    await handed_off(prefill, decode, "read")
    file = tmp_path / "trace.json"

    result = await traced("read", "--peer", decode.peer, "--chrome", str(file))

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert any(line.split()[:1] == ["confirming"] and "█" in line for line in lines)
    assert " ms: " in lines[-1]
    assert "%" in lines[-1]
    events = json.loads(file.read_text())["traceEvents"]
    assert {"offer", "fetch"} <= {event["name"] for event in events}


async def test_a_fetch_that_failed_is_the_last_line(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        blocks = {"num_tokens": 16, "block_ids": {"full": [1]}}
        offer = await source.prefill.offer("expired", **blocks, ttl_s=0.1)
        await offer.released()
        error = await failure_of(target.decode.fetch(offer.ticket, **blocks))

    result = await traced("expired", "--peer", decode.peer)
    answer = await told("expired", "--peer", decode.peer)

    _, fetch = answer["agents"]
    (stage,) = [one["name"] for one in fetch["spans"] if one["error"] and one["depth"] == 1]
    share, last = result.stdout.splitlines()[-2:]
    assert " ms: " in share
    assert last.startswith("the fetch failed after ")
    assert last.endswith(f" ms ({stage}): {error.code}: {error.message}")
    assert result.stdout.count(error.message) == 1
    assert answer["verdict"].startswith("the fetch failed after ")


async def test_a_full_disk_is_one_line_and_status_1(prefill, decode):
    await handed_off(prefill, decode, "full")

    result = await traced("full", "--peer", decode.peer, "--chrome", str(Path("/dev/full")))

    assert result.exit_code == 1
    assert result.stderr == "error: cannot write /dev/full: No space left on device\n"


async def test_what_nobody_remembers_is_one_line_and_status_1(prefill, decode):
    result = await traced("never", "--peer", decode.peer)

    assert result.exit_code == 1
    assert result.stderr.startswith("error: no agent remembers 'never': asked decode-")


async def test_an_agent_that_does_not_answer_is_a_warning(prefill, decode):
    await handed_off(prefill, decode, "half")

    silent = "tcp://127.0.0.1:9"
    result = await traced("half", "--peer", decode.peer, "--peer", silent, "--timeout", "0.5")

    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: {silent}: timeout: ")
