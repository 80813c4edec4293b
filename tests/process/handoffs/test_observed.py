"""Metrics, status, costs and histories of agents, and spans at a collector."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.engine import AgentRole, Link
from kvbus.errors import ErrorCode, LocalError
from kvbus.spawn import free_port
from tests.process.handoffs.shapes import GROUP, WINDOW, ShapedAgents, Side, two_engines
from tests.support.agents import AgentProcess, Agents, started, until, wait_until
from tests.support.collector import collecting
from tests.support.engines import (
    NOTHING,
    ONE_BLOCK,
    Engine,
    begin,
    engine,
    failure_of,
    hand_over,
    make_spec,
    pair,
    works,
)
from tests.support.plain_sockets import ask, plain_socket

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference.md"
KVBUS = str(Path(sys.executable).with_name("kvbus"))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT, OTHER_PARENT = "00f067aa0ba902b7", "10f067aa0ba902b7"
PROCESS = "process_"
"""Metrics of the process are prometheus_client's, and only named in part."""


def test_every_metric_of_both_agents_is_documented_and_no_other(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    pages = [agent.page("/metrics")[1] for agent in (prefill, decode)]
    served = {
        name if kind != "counter" else name.removesuffix("_total") + "_total"
        for page in pages
        for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE)
        if not name.startswith(PROCESS) and not name.endswith("_created")
    }
    documented = set(re.findall(r"^- `(kvbus_\w+)", PAGE.read_text(), re.MULTILINE))
    assert served == documented


async def test_both_agents_send_spans_of_trace_named_by_engine(prefill: AgentProcess) -> None:
    with (
        collecting() as collector,
        started("prefill", "decode", otlp_endpoint=collector.endpoint) as sending,
    ):
        source_agent, target_agent = sending.all
        async with pair(source_agent.attach, target_agent.attach) as (source, target):
            traced = await source.prefill.offer(
                "r", **ONE_BLOCK, traceparent=f"00-{TRACE}-{PARENT}-01"
            )
            own = f"00-{TRACE}-{OTHER_PARENT}-01"
            await target.decode.fetch(traced.ticket, **ONE_BLOCK, traceparent=own).ended
            gone = await source.prefill.offer("gone", **ONE_BLOCK)
            await gone.withdraw()
            await failure_of(target.decode.fetch(gone.ticket, **ONE_BLOCK))

        def of(trace_id: str, service: str) -> dict[str, Any]:
            spans = collector.of(f"kvbus-{service}")
            return {span.name: span for span in spans if span.trace_id == trace_id}

        for trace_id, service in product((TRACE, gone.offer_id), ("prefill", "decode")):
            await until(partial(of, trace_id, service))
        of_offer, of_fetch = of(TRACE, "prefill"), of(TRACE, "decode")
        assert of_offer["offer"].parent_id == PARENT
        assert of_fetch["fetch"].parent_id == OTHER_PARENT
        assert {"leased", "sealed"} <= of_offer.keys()
        assert {"acquiring", "reading", "READ", "committing"} <= of_fetch.keys()
        assert of_fetch["fetch"].attributes["kvbus.num_bytes"] > 0
        assert of(gone.offer_id, "decode")["fetch"].error.startswith("offer_withdrawn")
        agents = {span.resource["kvbus.agent_id"] for span in collector.spans}
        assert agents == {agent.settings["agent_id"] for agent in sending.all}
        assert source_agent.memory_maps("google/_upb") > 0
        assert prefill.memory_maps("google/_upb") == 0, "it needs no protobuf"


@pytest.mark.long
def test_an_agent_that_lacks_the_package_says_what_to_install(
    fresh: Agents, tmp_path: Path
) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    agent = fresh.prepare("prefill", env={"PYTHONPATH": path}, otlp_endpoint="http://x:4318")
    agent.launch()
    assert agent.exit_status() == 1
    assert "pip install 'kvbus[otel]'" in agent.log_path.read_text()
    agent.expected_trouble.add("not json")


async def status(*arguments: str) -> list[str]:
    result = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(app, ["status", *arguments]))
    assert result.exit_code == 0, result.stderr
    return [line.partition(" s  ")[2] or line for line in result.stdout.splitlines()]


async def test_both_agents_show_the_history_of_a_handoff(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        handoff = await begin(source, target, 16)
        await handoff.completed()
    of_fetch = await status(decode.peer, "--fetch", handoff.fetch.fetch_id)
    of_offer = await status(prefill.peer, "--offer", handoff.offer.offer_id)
    assert "Acquire -> reading: ReadChunk" in of_fetch
    assert "transfer 0 TransferDue -> reading: Begin" in of_fetch, of_fetch
    assert "transfer 0 StageEnded -> over: -" in of_fetch
    assert "Commit -> completed: ReportFetched" in of_fetch
    assert any(line.startswith("MakeOffer -> sealed") for line in of_offer)
    assert of_offer[-1].startswith("Commit -> released")


def watched(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVBUS, "status", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "COLUMNS": "100", **variables},
    )


def row(shown: str, name: str) -> list[str]:
    line = next(line for line in shown.splitlines() if line.strip().startswith(name))
    return re.split(r"\s{2,}", line.strip())[1:]


async def test_status_shows_agents_as_columns_and_faults_below(fresh: Agents) -> None:
    prefill, decode = fresh.both()
    nobody = f"127.0.0.1:{free_port()}"
    binds = [agent.settings["http_bind"] for agent in fresh.all]
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        withdrawn = await source.prefill.offer("withdrawn", **NOTHING)
        await withdrawn.withdraw()
        failure = await failure_of(target.decode.fetch(withdrawn.ticket, **NOTHING, timeout_s=1))
        gone = await source.prefill.offer("gone", **NOTHING, ttl_s=0.1)
        await gone.ended
        late = await failure_of(target.decode.fetch(gone.ticket, **NOTHING))
        shown, as_json = [
            await anyio.to_thread.run_sync(partial(watched, *binds, *more))
            for more in ((nobody, "--every", "0.1"), ("--json",))
        ]
        told = json.loads(as_json.stdout)
    assert shown.returncode == 0, shown.stderr
    assert row(shown.stdout, "state") == ["serving", "serving"]
    assert row(shown.stdout, "peers") == ["1"]
    assert "committing" not in shown.stdout, "no handoff between the two reports"
    assert f"{nobody}: no answer" in shown.stdout
    assert late.code.value in shown.stdout
    assert "offer_ttl_s" in shown.stdout
    assert failure.code.value not in shown.stdout, "a withdrawn offer is no fault"
    assert [told[f"http://{bind}"]["status"]["role"] for bind in binds] == ["prefill", "decode"]


def test_status_without_addresses_asks_pods_agent_with_token(fresh: Agents, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{'t' * 32}\n")
    token.chmod(0o600)
    agent = fresh.prepare("prefill", http_token_file=str(token))
    fresh.start(agent)
    _, _, port = agent.settings["http_bind"].rpartition(":")
    pod = {"KVBUS_HTTP_BIND": f"127.0.0.1:{port}", "KVBUS_HTTP_TOKEN_FILE": str(token)}
    shown = watched("--json", **pod)
    told = json.loads(shown.stdout)
    assert list(told) == [f"http://127.0.0.1:{port}"], shown.stderr
    assert "status" in told[f"http://127.0.0.1:{port}"]


def test_status_names_cause_when_it_cannot_ask_and_exits_nonzero() -> None:
    addresses = ("nonsense", "http://:1", "ftp://a:1", "a:b")
    for arguments, exit_status, words in (
        (("127.0.0.1:9", "--every", "0.1"), 1, "http_bind"),
        *(((address,), 2, "HOST:PORT") for address in addresses),
        (("127.0.0.1:1", "--token-file", "/nowhere"), 2, "--token-file"),
    ):
        shown = CliRunner().invoke(app, ["status", *arguments])
        assert (shown.exit_code, words in shown.stderr) == (exit_status, True)


def test_ctrl_c_ends_events_with_status_0(decode: AgentProcess, tmp_path: Path) -> None:
    out, command = tmp_path / "out", [KVBUS, "status", decode.peer, "--events"]
    with (
        out.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            wait_until(lambda: "boot" in out.read_text(), "it has shown something")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert "Traceback" not in out.read_text()
        finally:
            process.kill()


TOKEN_BYTES = 2 * 2 * 6 * 8 * 2


def cost(decode: AgentProcess, prefill: AgentProcess, target: Engine, **asked: Any) -> Any:
    body = {"endpoint": prefill.peer, "decode_engine": target.spec.engine_id, "num_tokens": 64}
    answer = ask(decode.peer, "cost", body | asked)
    return answer["ok"] if "ok" in answer else answer["error"]


async def test_cost_is_guessed_first_and_learned_from_handoffs(fresh: Agents) -> None:
    prefill, decode = fresh.both()
    async with pair(prefill.attach, decode.attach) as (source, target):
        guessed = cost(decode, prefill, target, num_tokens=100, first_token=20)
        stages = [(await hand_over(source, target, 64)).stages_s for _ in range(10)]
        known = cost(decode, prefill, target)
        query = f"/cost?endpoint={prefill.peer}&decode_engine={target.spec.engine_id}"
        pages = [decode.page(f"{query}&num_tokens={number}") for number in ("64", "many")]
        await anyio.to_thread.run_sync(request_for_strangers, decode, target)
        later = cost(decode, prefill, target)
    took_s = [one.queued + one.acquiring + one.reading + one.committing for one in stages]
    assert guessed["num_bytes"] == 80 * TOKEN_BYTES
    assert (guessed["path"], guessed["num_observed"]) == ("", 0)
    assert guessed["predicted_s"] > 0
    assert (known["path"], known["num_observed"]) == ("direct", 10)
    assert min(took_s) <= known["predicted_s"] <= max(took_s)
    assert [status for status, _ in pages] == [200, 400]
    assert json.loads(pages[0][1]) == known
    assert later == known, "requests for unknown agents change nothing"


def request_for_strangers(decode: AgentProcess, target: Engine) -> None:
    with plain_socket(decode.peer) as dealer:
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


async def test_link_for_wrong_agent_kind_is_refused_with_both_named(decode: AgentProcess) -> None:
    with pytest.raises(LocalError, match="for decode engines, not prefill"):
        async with Link(decode.attach, make_spec(), role=AgentRole.PREFILL):
            pass


@pytest.mark.parametrize(("size", "are_whole"), [(8, True), (48, False)])
async def test_fetch_tells_whether_window_blocks_are_whole(
    shapes: ShapedAgents, size: int, are_whole: bool
) -> None:
    sides, groups = (Side(block_size=8), Side(block_size=size)), (GROUP, WINDOW)
    async with two_engines(shapes, "direct", *sides, groups=groups) as engines:
        fetched = await hand_over(*engines, 60, only_tails=True)
        assert fetched.whole_blocks is are_whole


async def test_status_shows_held_and_work_is_counted_and_logged_once(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    counts: list[tuple[AgentProcess, str, dict[str, str], float]] = [
        (decode, "handoffs_total", {"outcome": "completed"}, 1),
        (decode, "read_bytes_total", {}, 16 * TOKEN_BYTES),
        (decode, "handoff_seconds_count", {}, 1),
        (prefill, "offers_total", {"outcome": "completed"}, 1),
        (prefill, "leases_total", {"reason": "ended"}, 1),
        (decode, "digests_total", {"outcome": "equal"}, 0),
    ]

    def read() -> list[float]:
        return [agent.metric(name, **labels) for agent, name, labels, _ in counts]

    request_id = uuid.uuid4().hex
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        before = read()
        offer = await source.prefill.offer(request_id, **ONE_BLOCK)
        theirs, ours = prefill.status(), decode.status()
        await target.decode.fetch(offer.ticket, **ONE_BLOCK, chunk_tokens=16).ended  # under a lease
        await offer.ended
        told = [
            agent.says(event, request_id=request_id)
            for agent, event in ((prefill, "offer.released"), (decode, "handoff.completed"))
        ]
        gained = [now - then for now, then in zip(read(), before, strict=True)]
        assert (theirs["role"], theirs["draining"]) == ("prefill", False)
        assert theirs["agent_id"] == prefill.settings["agent_id"]
        assert theirs["engines"] == {source.spec.engine_id: True}
        assert theirs["counts"].items() >= {"offers": 1, "leases": 0}.items()
        assert ours["engines"] == {target.spec.engine_id: True}
        assert ours["counts"].items() >= {"fetches": 0, "draining_fetches": 0}.items()
        assert gained == [expected for *_, expected in counts]
        assert [len(lines) for lines in told] == [1, 1]
        assert decode.metric("engines") == prefill.metric("engines") == 1
        assert decode.metric("peers") >= 1
        assert decode.metric("data_jobs") == 0
