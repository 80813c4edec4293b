"""``kvbus doctor --config``: whether agents can have their ports, folder, keys and staging."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbus.protocol import Role
from kvbus.spawn import free_port
from tests.support.agents import Agents, write_config
from tests.support.keyring import KeyRing
from tests.tools.doctor.running import Findings, doctor, severities

TAKEN = f"cannot be bound: {os.strerror(98)}"
NOT_HERE = f"cannot be bound: {os.strerror(99)}"
ANY_PORT = "tcp://127.0.0.1:0"


def config(folder: Path, name: str = "one", **keys: Any) -> list[str]:
    """Options for an agent of this name; what is not told is as it should be."""
    path = folder / f"{name}.toml"
    wanted = {"agent_id": name, "peer_bind": ANY_PORT, "events_bind": ANY_PORT}
    write_config(path, {**wanted, "runtime_dir": str(folder / name), **keys})
    return ["--config", str(path)]


def look_at(*configs: list[str]) -> Findings:
    """What is found of the agents, without the family's name."""
    found = doctor("--only", "agents", *(word for one in configs for word in one))
    return {name.removeprefix("agents."): one for name, one in found.items()}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_an_agent_that_may_have_all_that_it_wants_leaves_nothing(folder: Path) -> None:
    found = look_at(config(folder, runtime_dir=str(folder / "deep" / "run")))

    assert set(severities(found).values()) == {"ok"}
    assert found.keys() == {
        *("one.ports", "one.runtime_dir", "one.interfaces", "one.keys", "staging")
    }
    assert [path.name for path in folder.iterdir()] == ["one.toml"]


@pytest.mark.parametrize(
    ("key", "address", "error"),
    [
        ("peer_bind", "tcp://192.0.2.1:7701", NOT_HERE),
        ("http_bind", "127.0.0.1:{taken}", TAKEN),
        ("events_bind", "tcp://127.0.0.1:{taken}-{taken}", TAKEN),
        ("events_bind", "tcp://127.0.0.1:{taken}-{more}", ""),
        ("events_bind", "tcp://lo:0", ""),
    ],
)
def test_unavailable_address_in_any_form_is_an_error(
    folder: Path, taken: int, key: str, address: str, error: str
) -> None:
    at = address.format(taken=taken, more=min(taken + 50, 65_535))

    found = look_at(config(folder, **{key: at}, advertise_host="127.0.0.1"))

    assert ("one.ports" in found) == (not error)
    if error:
        port = at.rpartition(":")[2].partition("-")[0]
        assert found[f"one.{key}"]["severity"] == "error"
        assert error in found[f"one.{key}"]["found"]
        assert found[f"one.{key}"]["command"] == f"ss -ltnp 'sport = :{port}'"


def test_an_advertised_host_is_one_of_this_machine_or_is_doubted(folder: Path) -> None:
    hosts = {"a": "127.0.0.1", "b": "192.0.2.1", "c": "nowhere.invalid"}

    found = look_at(*(config(folder, name, advertise_host=at) for name, at in hosts.items()))

    told = {name: found[f"{name}.advertise_host"]["found"] for name in hosts}
    assert found["a.advertise_host"]["severity"] == "ok"
    assert found["b.advertise_host"]["severity"] == "warning"
    assert "192.0.2.1 is no address of this machine" in told["b"]
    assert "'nowhere.invalid'" in told["c"]


@pytest.mark.parametrize(
    ("name", "mode", "problem"),
    [("run", 0o700, ""), ("run", 0o755, "mode 0755"), ("x" * 100, None, "Linux allows 107")],
)
def test_a_folder_is_looked_at_and_left_as_it_is(
    folder: Path, name: str, mode: int | None, problem: str
) -> None:
    path = folder / name
    if mode is not None:
        path.mkdir()
        path.chmod(mode)

    found = look_at(config(folder, runtime_dir=str(path)))["one.runtime_dir"]

    assert found["severity"] == ("error" if problem else "ok")
    assert problem in found["found"]
    assert (stat.S_IMODE(path.stat().st_mode) if path.exists() else None) == mode


def test_agents_clash_by_address_name_folder_or_too_much_memory(folder: Path) -> None:
    port = free_port()
    same = {"peer_bind": f"tcp://127.0.0.1:{port}", "runtime_dir": str(folder / "run")}
    large = {"staging_bytes": 1 << 40}

    found = look_at(config(folder, "one", **same, **large), config(folder, "two", **same, **large))
    twins = look_at(config(folder), config(folder))
    apart = look_at(config(folder, "one"), config(folder, "two"))

    at = f"127.0.0.1:{port}"
    assert set(found["clash"]["values"]["wanted_twice"]) == {at, str(folder / "run")}
    assert found["staging"]["severity"] == "error"
    assert found["staging"]["values"]["wanted_bytes"] == 2 << 40
    assert twins.keys() >= {"one.ports", "one#2.ports", "one#2.keys", "clash"}
    assert set(twins["clash"]["values"]["wanted_twice"]) == {"one", str(folder / "one")}
    assert "clash" not in apart


@pytest.mark.parametrize(
    ("status", "severity", "said"),
    [(0, "ok", "kept from other users"), (1, "warning", "open to other users")],
)
def test_ucx_on_loopback_is_checked_with_rule_closing_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, status: int, severity: str, said: str
) -> None:
    iptables = folder / "iptables"
    iptables.write_text(f"#!/bin/sh\nexit {status}\n")
    iptables.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    found = look_at(config(folder, data_ports="40000-40031", mapped=False))["one.loopback"]

    rule = f"-p tcp --dport 40000:40031 -m owner ! --uid-owner {os.geteuid()} -j REJECT"
    assert found["severity"] == severity
    assert found["found"].endswith(said)
    assert found["command"].endswith("" if severity == "ok" else rule)


def test_unfenced_data_plane_and_wrong_keys_or_tokens_are_errors(folder: Path) -> None:
    token = folder / "token"
    token.write_text("a-token-of-some-length")
    token.chmod(0o644)

    found = look_at(
        config(folder, "open", peer_bind="tcp://*:0", advertise_host="127.0.0.1"),
        config(folder, "door", http_bind="127.0.0.1:0", http_token_file=str(token)),
        config(folder, "key", key_file="/nowhere"),
    )

    names = {
        "open.interfaces": "data_interfaces",
        "door.keys": "http_token_file",
        "key.keys": "key_file",
    }
    assert {found[name]["severity"] for name in names} == {"error"}
    assert all(text in found[name]["found"] for name, text in names.items())


@pytest.mark.parametrize(
    ("trusted", "text"), [(Role.ROUTER, "as decode or prefill"), (Role.DECODE, "")]
)
def test_an_agent_that_trusts_no_agent_of_another_role_is_warned(
    folder: Path, trusted: Role, text: str
) -> None:
    ring = KeyRing(folder)
    ring.trust("one", Role.PREFILL)
    ring.trust("other", trusted)

    keys = look_at(config(folder, **ring.settings("one")))["one.keys"]

    assert keys["severity"] == ("warning" if text else "ok")
    assert keys["found"].endswith(text)


def test_running_agents_have_ports_and_each_pair_is_checked_once(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode", mapped=True)
    closed = fresh.prepare("decode", mapped=False, staging_bytes=0)
    fresh.start(prefill, decode, closed)

    files = [["--config", str(one.folder / "config.toml")] for one in (*fresh.all, prefill)]
    found = look_at(*files)

    ports = {one["found"] for name, one in found.items() if name.endswith(".ports")}
    pairs = {"decode-1.maps.prefill-0", "decode-2.maps.prefill-0"}
    assert ports == {"the agent runs already, and has its ports"}
    assert {name for name in found if ".maps." in name} == pairs
    assert found["prefill-0.faults"]["severity"] == "ok"
    assert found["decode-1.maps.prefill-0"]["severity"] == "ok"
    assert "closed by the decode agent's config" in found["decode-2.maps.prefill-0"]["found"]
