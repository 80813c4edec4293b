"""The command line: refusals name the option, and asking for help does not load torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.demo import command
from kvbus.demo.messages import Decoded, Prefilled, Step
from kvbus.demo.model_config import MAX_KV_HEADS, MAX_TP, Attention, ModelConfig
from kvbus.demo.options import DemoOptions, EngineShape, Layout, ReadPath
from kvbus.demo.processes import ROLES, agent_settings
from kvbus.demo.report import DemoReport, Served
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import StageTimes
from tests.agents import Agents, agents_ended


def kvbus(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--requests", "0"], "--requests"),
        (["--layout", "ABC"], "'hnd'"),
        (["--prefill-tp", "9"], "--prefill-tp"),
        (["--prompt-file", "/nowhere/at/all"], "cannot read /nowhere/at/all"),
        (["--max-new-tokens", "4000"], "4096"),
        (["--keep-logs", "/dev/null/logs"], "/dev/null/logs"),
        (["--decode-pp", "5"], "--decode-pp"),
        (["--decode-layout", "NH"], "--decode-layout"),
        (["--prefill-block-size", "0"], "--prefill-block-size"),
        (["--window", "1"], "--window"),
        (["--path", "fast"], "'packed'"),
        (["--attention", "mha"], "'mla'"),
        (["--attention", "mla", "--kv-heads", "4"], "--kv-heads is for --attention gqa"),
        (["--prefill-memory", "disk"], "'shared'"),
        (["--ring-share", "0"], "--ring-share"),
        (["--decode-memory", "host", "--ring-share", "0.2"], "raise --ring-share or --concurrency"),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments: list[str], told: str) -> None:
    result = kvbus("demo", *arguments)

    assert result.exit_code == 2
    assert told in result.output


def test_a_prompt_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("\n  \n")

    result = kvbus("demo", "--prompt-file", str(path))

    assert result.exit_code == 2
    assert "has no prompts" in result.output


def test_the_version_is_that_of_the_package() -> None:
    result = kvbus("--version")

    assert result.exit_code == 0
    assert result.output.startswith("kvbus 0.")


def test_the_model_has_a_query_head_for_each_rank_whatever_its_kv_heads() -> None:
    models = [ModelConfig(kv_heads=heads) for heads in range(1, MAX_KV_HEADS + 1)]

    assert min(model.num_query_heads for model in models) == MAX_TP
    assert [model.num_query_heads % model.kv_heads for model in models] == [0] * MAX_KV_HEADS


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """What runs were asked for; none is started."""
    runs: list[DemoOptions] = []

    async def run(options: DemoOptions, _: object) -> DemoReport:
        runs.append(options)
        return DemoReport(options, leaks={})

    monkeypatch.setattr(command, "run_demo", run)
    return runs


def test_the_options_of_both_engines_are_for_each_that_has_none_of_its_own(
    asked: list[DemoOptions],
) -> None:
    both = ("--layout", "HND", "--block-size", "48")

    results = [
        kvbus("demo", *both),
        kvbus("demo", *both, "--prefill-layout", "nhd", "--decode-block-size", "5"),
        kvbus("demo", "--cross-layer"),
        kvbus("demo", "--decode-cross-layer", "--prefill-tp", "3", "--decode-pp", "2"),
    ]

    hnd = EngineShape(layout=Layout.HND, block_size=48)
    assert [result.exit_code for result in results] == [1, 1, 1, 1]  # nothing was served
    assert [(run.shape("prefill"), run.shape("decode")) for run in asked] == [
        (hnd, hnd),
        (
            EngineShape(layout=Layout.NHD, block_size=48),
            EngineShape(layout=Layout.HND, block_size=5),
        ),
        (EngineShape(cross_layer=True), EngineShape(cross_layer=True)),
        (EngineShape(tp=3), EngineShape(pp=2, cross_layer=True)),
    ]


def test_the_options_of_the_model_and_of_the_handoff_reach_the_run(
    asked: list[DemoOptions],
) -> None:
    kvbus("demo", "--kv-heads", "6", "--window", "40", "--seed", "3", "--path", "packed")
    kvbus("demo", "--attention", "mla", "--prefill-chunk", "32")

    assert [run.model for run in asked] == [
        ModelConfig(seed=3, kv_heads=6, window=40),
        ModelConfig(attention=Attention.MLA),
    ]
    assert [(run.path, run.prefill_chunk) for run in asked] == [
        (ReadPath.PACKED, None),
        (ReadPath.AUTO, 32),
    ]


def test_the_json_says_what_was_run(asked: list[DemoOptions]) -> None:
    result = kvbus("demo", "--json", "--decode-tp", "2", "--attention", "mla", "--path", "direct")

    figures = json.loads(result.output.splitlines()[-1])
    shape = {"pp": 1, "layout": "NHD", "block_size": 16, "cross_layer": False, "memory": "shared"}
    assert figures["prefill"] == {"tp": 1, **shape}
    assert figures["decode"] == {"tp": 2, **shape}
    assert figures["model"] == {"seed": 0, "attention": "mla", "kv_heads": 4, "window": None}
    assert (figures["path"], figures["prefill_chunk"]) == ("direct", None)


def test_a_run_that_ended_early_shows_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One output is as it has to be, one request failed, one is on its way, one has not begun."""
    steps, stages = [Step(1, "a"), Step(2, "b")], StageTimes(0.1, 0.1, 0.1, 0.1, 0.1)

    async def run(options: DemoOptions, _: object) -> DemoReport:
        prefilled = Prefilled("r", steps[0], 3, 0.0)
        decoded = Decoded("r", steps[1:], 4096, "direct", 0.5, 0.5, stages)
        served = [
            Served("r", "prompt", prefilled, decoded),
            Served("r", "prompt", failed=RequestRefused("no room", code=ErrorCode.BUSY)),
            Served("r", "prompt", prefilled),
        ]
        trouble = ["the decode agent was ended"]
        return DemoReport(options, served, alone={"prompt": steps}, trouble=trouble)

    monkeypatch.setattr(command, "run_demo", run)

    result = kvbus("demo", "--requests", "4", "--json")

    figures = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 1
    assert result.stderr == "error: the decode agent was ended\n"
    assert [figures[key] for key in ("requests", "matched", "failed", "unfinished")] == [4, 1, 1, 2]
    assert (figures["trouble"], figures["leaked_blocks"]) == (["the decode agent was ended"], None)
    for said in ("1 of 4 outputs equal", "1 failed: busy: no room", "2 did not finish", "?"):
        assert said in result.stdout


@pytest.mark.parametrize("digest", ["b", "other"])
def test_an_output_of_the_same_tokens_matches_by_its_digests_only(digest: str) -> None:
    prefilled = Prefilled("r", Step(1, "a"), 3, 0.0)
    decoded = Decoded("r", [Step(2, digest)], 4096, "direct", 0.5, 0.5, StageTimes())
    alone = {"prompt": [Step(1, "a"), Step(2, "b")]}
    served = [Served("r", "prompt", prefilled, decoded)]

    report = DemoReport(DemoOptions(requests=1), served, alone, leaks={"offers": 0})

    assert (report.num_matched, report.ok) == ((1, True) if digest == "b" else (0, False))


@pytest.mark.parametrize("leaks", [None, {"offers": 0, "fetches": 1}])
def test_what_is_still_held_or_not_counted_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, leaks: dict[str, int] | None
) -> None:
    steps = [Step(1, "a"), Step(2, "b")]

    async def run(options: DemoOptions, _: object) -> DemoReport:
        prefilled = Prefilled("r", steps[0], 3, 0.0)
        decoded = Decoded("r", steps[1:], 4096, "direct", 0.5, 0.5, StageTimes())
        served = [Served("r", "prompt", prefilled, decoded)]
        return DemoReport(options, served, alone={"prompt": steps}, leaks=leaks)

    monkeypatch.setattr(command, "run_demo", run)

    result = kvbus("demo", "--requests", "1", "--json")

    figures = json.loads(result.stdout.splitlines()[-1])
    assert (result.exit_code, figures["matched"]) == (1, 1)
    assert figures["leaked_blocks"] == (None if leaks is None else 1)
    assert ("still held: 0 offers, 1 fetches" in result.stdout) == (leaks is not None)


@pytest.mark.parametrize("path", ReadPath)
def test_only_the_decode_agent_is_told_a_path_and_only_a_forced_one(path: ReadPath) -> None:
    prefill, decode = (agent_settings(role, DemoOptions(path=path)) for role in ROLES)

    assert "path" not in prefill
    assert decode.get("path", "auto") == path


def test_the_help_shows_every_option_whole_on_80_columns() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "80"})

    assert "…" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_driver_starts_without_torch() -> None:
    code = "import kvbus.demo.command, kvbus.status_command, sys; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_status_shows_what_an_agent_holds() -> None:
    with agents_ended(Agents) as agents:
        agent = agents.prepare("prefill")
        agents.start(agent)
        table, as_json = kvbus("status", agent.peer), kvbus("status", agent.peer, "--json")

    assert (table.exit_code, as_json.exit_code) == (0, 0)
    assert "prefill-0: prefill agent, serving" in table.output
    assert '"counts":{"offers":0,"leases":0' in as_json.output


def test_status_says_that_nobody_answers() -> None:
    result = kvbus("status", "tcp://127.0.0.1:1", "--timeout", "0.1")

    assert result.exit_code == 1
    assert "no agent answered at tcp://127.0.0.1:1 within 0.1 s" in result.output


def test_status_refuses_an_address_that_is_none() -> None:
    result = kvbus("status", "nonsense")

    assert result.exit_code == 2
    assert "nonsense" in result.output
