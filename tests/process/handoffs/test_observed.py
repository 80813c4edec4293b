"""What others see of agents: spans at a collector, history, status, and what is documented."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.spawn import free_port
from tests.support.agents import AgentProcess, Agents, started, until, wait_until
from tests.support.collector import collecting
from tests.support.engines import begin, failure_of, pair, works

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference.md"
KVBUS = str(Path(sys.executable).with_name("kvbus"))
NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}
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


async def test_both_agents_send_spans_of_trace_named_by_engine(
    prefill: AgentProcess,
) -> None:
    with (
        collecting() as collector,
        started("prefill", "decode", otlp_endpoint=collector.endpoint) as sending,
    ):
        source_agent, target_agent = sending.all
        async with pair(source_agent.attach, target_agent.attach) as (source, target):
            traced = await source.prefill.offer("r", **BLOCK, traceparent=f"00-{TRACE}-{PARENT}-01")
            own = f"00-{TRACE}-{OTHER_PARENT}-01"
            await target.decode.fetch(traced.ticket, **BLOCK, traceparent=own).ended
            gone = await source.prefill.offer("gone", **BLOCK)
            await gone.withdraw()
            await failure_of(target.decode.fetch(gone.ticket, **BLOCK))

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
        assert prefill.memory_maps("google/_upb") == 0, "who sends nothing imports nothing for it"


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
    """What ``kvbus status`` prints; the command runs an event loop of its own."""
    result = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(app, ["status", *arguments]))
    assert result.exit_code == 0, result.stderr
    return [line.partition(" s  ")[2] or line for line in result.stdout.splitlines()]


async def test_the_story_of_a_handoff_is_told_on_both_sides(
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
    """The cells of a row."""
    line = next(line for line in shown.splitlines() if line.strip().startswith(name))
    return re.split(r"\s{2,}", line.strip())[1:]


async def test_each_agent_is_a_column_and_what_is_wrong_stands_below(
    fresh: Agents,
) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    fresh.start(prefill, decode)
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

        look = partial(watched, *binds, nobody, "--every", "0.1")
        shown = await anyio.to_thread.run_sync(look)
        told = json.loads(
            (await anyio.to_thread.run_sync(partial(watched, *binds, "--json"))).stdout
        )

    assert shown.returncode == 0, shown.stderr
    assert row(shown.stdout, "state") == ["serving", "serving"]
    assert row(shown.stdout, "peers") == ["1"]
    assert "committing" not in shown.stdout, "nothing happened between the two looks"
    assert f"{nobody}: no answer" in shown.stdout
    assert late.code.value in shown.stdout
    assert "offer_ttl_s" in shown.stdout
    assert failure.code.value not in shown.stdout, "nobody wanted that one any more"
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


@pytest.mark.parametrize(
    ("arguments", "exit_status", "words"),
    [
        (("127.0.0.1:9", "--every", "0.1"), 1, "http_bind"),
        *(
            ((address,), 2, "HOST:PORT")
            for address in ("nonsense", "http://:1", "ftp://a:1", "a:b")
        ),
        (("127.0.0.1:1", "--token-file", "/nowhere"), 2, "--token-file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_status_names_cause_when_it_cannot_ask_and_exits_nonzero(
    arguments: tuple[str, ...], exit_status: int, words: str
) -> None:
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
