"""An agent with a wrong configuration does not start, says which key is wrong, and exits not 0."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbus.agent import load_config
from kvbus.errors import ConfigError
from kvbus_decode.config import DecodeConfig
from kvbus_prefill.config import PrefillConfig
from tests.agents import AgentProcess, write_config
from tests.faults.conftest import Started

KINDS: dict[str, type[Any]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
ADDRESSES = ("peer_bind", "events_bind", "http_bind")


def ended(agent: AgentProcess) -> tuple[int, str]:
    """How an agent that cannot start ended, and what it said."""
    agent.launch()
    status = agent.exit_status()
    return status, "\n".join(agent.lines())


@pytest.mark.parametrize(
    ("role", "changes", "named"),
    [
        ("prefill", {"offer_tll_s": 1.0}, "offer_tll_s"),
        ("decode", {"offer_ttl_s": 1.0}, "offer_ttl_s"),
        ("decode", {"max_fetches": "many"}, "max_fetches"),
        ("decode", {"max_fetches": 0}, "max_fetches"),
        ("decode", {"lease_s": -1.0}, "lease_s"),
        ("prefill", {"agent_id": None}, "agent_id"),
        ("prefill", {"agent_id": "a b"}, "agent_id"),
        ("decode", {"peer_bind": "127.0.0.1:0"}, "peer_bind"),
        ("prefill", {"peer_bind": "tcp://0.0.0.0:0"}, "advertise_host"),
        ("decode", {"transport": {"slice_bytes": 1}}, "transport.slice_bytes"),
        ("decode", {"transport": {"slices": 1}}, "slices"),
    ],
)
def test_a_wrong_key_is_refused_by_its_name_and_file(
    fresh: Started, role: str, changes: dict[str, Any], named: str
) -> None:
    agent = fresh.prepare(role, **changes)
    settings = {k: v for k, v in agent.settings.items() if v is not None}
    path = agent.folder / "config.toml"
    write_config(path, settings)

    with pytest.raises(ConfigError) as refused:
        load_config(KINDS[role], path)

    assert named in refused.value.message
    assert str(path) in refused.value.message


@pytest.mark.parametrize("content", [None, b"this is = not = toml", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "agent.toml"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError) as refused:
        load_config(DecodeConfig, path)

    assert str(path) in refused.value.message


@pytest.mark.parametrize(
    ("changes", "status", "named"),
    [
        ({"max_fetches": "many"}, 2, "max_fetches"),
        ({"http_bind": "127.0.0.1:99999"}, 2, "http_bind"),
        ({"peer_bind": "tcp://127.0.0.1:99999"}, 2, "peer_bind"),
        ({"runtime_dir": f"/dev/shm/{120 * 'x'}"}, 1, "107"),  # noqa: S108 - never made
    ],
    ids=["max_fetches", "http_bind", "peer_bind", "runtime_dir"],
)
def test_an_agent_that_cannot_start_says_why_and_exits(
    fresh: Started, changes: dict[str, Any], status: int, named: str
) -> None:
    agent = fresh.prepare("decode", **changes)
    agent.expected_trouble.add("not json")

    ended_with, said = ended(agent)

    assert ended_with == status
    assert named in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("changes", "env", "told"),
    [
        (
            {"staging_bytes": 1 << 40},
            {},
            "error: key 'staging_bytes': a segment of 1099511627776 bytes does not fit",
        ),
        (
            {"mapped": False},
            {"UCX_TLS": "bogus"},
            "error: UCX does not start on data_interfaces = ['lo'], UCX_TLS=bogus: ",
        ),
        ({}, {"UCX_NET_DEVICES": "bogus0"}, "error: UCX_NET_DEVICES: this machine has no bogus0"),
    ],
    ids=["staging_bytes", "UCX_TLS", "UCX_NET_DEVICES"],
)
def test_what_keeps_an_agent_from_starting_is_told_by_its_name(
    fresh: Started, changes: dict[str, Any], env: dict[str, str], told: str
) -> None:
    agent = fresh.prepare("decode", env=env, **changes)
    agent.expected_trouble.add("not json")

    status, said = ended(agent)

    assert status == 1
    assert told in said
    assert "Traceback" not in said


@pytest.mark.parametrize("taken", ["peer_bind", "events_bind", "http_bind", "runtime_dir"])
def test_what_another_agent_uses_is_named_and_the_other_one_lives_on(
    prefill: AgentProcess, fresh: Started, taken: str
) -> None:
    first = prefill
    in_use = {
        "peer_bind": first.peer,
        "events_bind": first.started["events"],
        "http_bind": first.settings["http_bind"],
        "runtime_dir": first.settings["runtime_dir"],
    }[taken]
    second = fresh.prefill(**{taken: in_use})

    status, said = ended(second)

    assert status == 1
    assert said.count(in_use.removeprefix("tcp://")) == 1
    assert taken == "runtime_dir" or f"error: key '{taken}': cannot bind" in said
    assert "Traceback" not in said
    assert not any(first.status()["counts"].values())
    second.expected_trouble.add("not json")


@pytest.mark.parametrize("role", KINDS)
def test_the_printed_configuration_is_the_default_and_explains_every_key(
    role: str, tmp_path: Path
) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", f"kvbus_{role}", "--print-config"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    ).stdout
    path = tmp_path / "agent.toml"
    path.write_text(printed)
    lines = printed.splitlines()

    config = load_config(KINDS[role], path)

    required = {"agent_id": f"{role}-0", **{k: getattr(config, k) for k in ADDRESSES}}
    assert config == KINDS[role](**required)
    assert all(
        lines[number - 1].startswith("# ") for number, line in enumerate(lines) if " = " in line
    )


def test_an_agent_that_was_killed_is_replaced_where_it_was(fresh: Started) -> None:
    agent = fresh.prefill()
    fresh.start(agent)
    agent.kill()
    left_behind = agent.attach.exists()

    agent.start()

    assert left_behind
    assert agent.idle()
    assert agent.metric("engines") == 0


def test_a_full_disk_is_one_line_and_not_a_success() -> None:
    with Path("/dev/full").open("w") as full:
        ended_with = subprocess.run(
            [sys.executable, "-m", "kvbus_decode", "--print-config"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
            check=False,
        )

    assert ended_with.returncode == 1
    assert ended_with.stderr == "error: cannot write to stdout: No space left on device\n"
