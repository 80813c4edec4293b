"""``kvbus doctor --config``: whether agents can have their ports, folder, keys and staging."""

import os
import socket
import stat
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvbus.keys import Role
from kvbus.spawn import free_port
from tests.agents import Agents, write_config
from tests.doctor.played_agents import agent, told_by
from tests.doctor.running import Findings, doctor, severities, show
from tests.keyring import KeyRing

TAKEN = os.strerror(98)
ANY_PORT = "tcp://127.0.0.1:0"


def config(folder: Path, name: str = "one", **keys: Any) -> list[str]:
    """Options for an agent of this name; what is not told is as it should be."""
    path = folder / f"{name}.toml"
    wanted = {"agent_id": name, "peer_bind": ANY_PORT, "events_bind": ANY_PORT}
    write_config(path, {**wanted, "runtime_dir": str(folder / name), **keys})
    return ["--config", str(path)]


def look_at(*configs: list[str], env: dict[str, str] | None = None) -> Findings:
    """What is found of the agents, without the family's name."""
    found = doctor("--only", "agents", *(word for one in configs for word in one), env=env)
    return {name.removeprefix("agents."): one for name, one in found.items()}


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which somebody listens."""
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
    ("key", "address"),
    [
        ("peer_bind", "tcp://127.0.0.1:{}"),
        ("events_bind", "tcp://*:{}"),
        ("events_bind", "tcp://lo:{}"),
        ("events_bind", "tcp://localhost:{}"),
        ("events_bind", "tcp://127.0.0.1:{0}-{0}"),
        ("http_bind", "127.0.0.1:{}"),
    ],
)
def test_a_port_that_is_taken_is_an_error_with_its_fix(
    folder: Path, taken: int, key: str, address: str
) -> None:
    at = address.format(taken)

    found = look_at(config(folder, **{key: at}, advertise_host="127.0.0.1"))

    assert found[f"one.{key}"]["severity"] == "error"
    assert f"cannot be bound: {TAKEN}" in found[f"one.{key}"]["found"]
    assert found[f"one.{key}"]["command"] == f"ss -ltnp 'sport = :{taken}'"


@pytest.mark.parametrize("address", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://lo:0", "{}-{}"])
def test_every_form_of_an_address_can_be_had_and_of_a_range_one_port(
    folder: Path, taken: int, address: str
) -> None:
    at = address.replace("{}-{}", f"tcp://127.0.0.1:{taken}-{min(taken + 50, 65_535)}")

    found = look_at(config(folder, events_bind=at, advertise_host="127.0.0.1"))

    assert found["one.ports"]["severity"] == "ok"


@pytest.mark.parametrize(
    ("address", "error"), [("tcp://192.0.2.1:7701", os.strerror(99)), ("tcp://[::1]:0", "")]
)
def test_an_address_that_is_not_of_this_machine_or_not_of_zeromq_is_an_error(
    folder: Path, address: str, error: str
) -> None:
    found = look_at(config(folder, peer_bind=address))["one.peer_bind"]

    assert found["severity"] == "error"
    assert error in found["found"]


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


def test_staging_of_all_must_fit(folder: Path) -> None:
    found = look_at(*(config(folder, name, staging_bytes=1 << 40) for name in ("one", "two")))

    assert found["staging"]["severity"] == "error"
    assert found["staging"]["values"]["wanted_bytes"] == 2 << 40


def test_agents_cannot_have_one_address_or_one_name_or_one_folder(folder: Path) -> None:
    port = free_port()
    same = {"peer_bind": f"tcp://127.0.0.1:{port}", "runtime_dir": str(folder / "run")}

    found = look_at(config(folder, "one", **same), config(folder, "two", **same))
    apart = look_at(config(folder, "one"), config(folder, "two"))
    shown = show("--only", "agents", *config(folder), *config(folder)).stdout

    assert set(found["clash"]["values"]["wanted_twice"]) == {
        *(f"127.0.0.1:{port}", str(folder / "run"))
    }
    assert "clash" not in apart
    assert "wanted more than once: one," in shown


@pytest.mark.parametrize(
    ("status", "severity", "said"),
    [(0, "ok", "kept from other users"), (1, "warning", "open to other users")],
)
def test_ucx_on_loopback_is_looked_at_with_the_rule_that_closes_it(
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


def test_an_agent_whose_data_plane_nobody_fenced_is_an_error(folder: Path) -> None:
    found = look_at(config(folder, peer_bind="tcp://*:0", advertise_host="127.0.0.1"))

    assert found["one.interfaces"]["severity"] == "error"
    assert "data_interfaces" in found["one.interfaces"]["found"]


@pytest.mark.parametrize(
    ("trusted", "said"),
    [([], "as decode or prefill"), ([Role.ROUTER], "as decode or prefill"), ([Role.DECODE], "")],
)
def test_an_agent_that_trusts_no_agent_of_another_role_is_warned(
    folder: Path, trusted: list[Role], said: str
) -> None:
    ring = KeyRing(folder)
    ring.trust("one", Role.PREFILL)
    for number, role in enumerate(trusted):
        ring.trust(f"other-{number}", role)

    keys = look_at(config(folder, **ring.settings("one")))["one.keys"]

    assert keys["severity"] == ("warning" if said else "ok")
    assert keys["found"].endswith(said)


def test_keys_and_tokens_that_are_wrong_are_an_error(folder: Path) -> None:
    token = folder / "token"
    token.write_text("a-token-of-some-length")
    token.chmod(0o644)
    secret = {"http_bind": "127.0.0.1:0", "http_token_file": str(token)}

    found = look_at(config(folder, "one", **secret), config(folder, "two", key_file="/nowhere"))

    assert (found["one.keys"]["severity"], found["two.keys"]["severity"]) == ("error", "error")
    assert "http_token_file" in found["one.keys"]["found"]
    assert "key_file" in found["two.keys"]["found"]


HERE = {"machine": "m", "uid": 7, "mount_namespace": "mnt:[1]", "path": "/run/p/memory.sock"}


@pytest.mark.parametrize(
    ("ours", "theirs", "severity", "said"),
    [
        ({}, {}, "ok", "open: one machine, one user"),
        ({"engines": {"e at p": "open"}}, {}, "ok", "memory is mapped: 1"),
        ({"engines": {"e at other": "no", "x at p": "no"}}, {}, "ok", "no engine of it was read"),
        ({"engines": {"e at p": "no agent at /x"}}, {}, "warning", "no agent at /x"),
        ({"uid": 8}, {}, "warning", "uid 8"),
        ({"mount_namespace": "mnt:[2]"}, {}, "warning", "/run/p/memory.sock may not be there"),
        ({"mount_namespace": "mnt:[2]", "engines": {"e at p": "open"}}, {}, "ok", "mapped"),
        ({"machine": "other"}, {}, "note", "different machines"),
        ({"closed": "closed by config"}, {}, "note", "closed by config"),
        ({}, {"closed": "closed by the prefill agent"}, "note", "closed by the prefill agent"),
        (None, {}, "note", "version"),
    ],
)
def test_whether_one_agent_maps_the_others_memory_is_told_by_what_both_say(
    folder: Path,
    ours: dict[str, Any] | None,
    theirs: dict[str, Any],
    severity: str,
    said: str,
) -> None:
    shared = None if ours is None else {**HERE, **ours}
    prefill = told_by("prefill", engines={"e": True}, sharing={**HERE, **theirs}) | {
        "agent_id": "p"
    }
    decode = told_by("decode", sharing=shared) | {"agent_id": "d"}
    with agent(prefill) as peer, agent(decode) as reader:
        found = look_at(config(folder, "p", peer_bind=peer), config(folder, "d", peer_bind=reader))

    assert found["d.maps.p"]["severity"] == severity
    assert said in found["d.maps.p"]["found"]


def test_agents_that_run_have_their_ports_and_each_pair_is_looked_at(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode", mapped=True)
    closed = fresh.prepare("decode", mapped=False, staging_bytes=0)
    fresh.start(prefill, decode, closed)

    found = look_at(*(["--config", str(one.folder / "config.toml")] for one in fresh.all))

    ids = [one.settings["agent_id"] for one in fresh.all]
    assert {found[f"{name}.ports"]["found"] for name in ids} == {
        "the agent runs already, and has its ports"
    }
    assert {name for name in found if ".maps." in name} == {
        f"{decode}.maps.{prefill}" for prefill, decode in product(ids[:1], ids[1:])
    }
    assert found["decode-1.maps.prefill-0"]["severity"] == "ok"
    assert "closed by the decode agent's config" in found["decode-2.maps.prefill-0"]["found"]


def test_a_port_that_another_agent_has_is_said_to_be_its(folder: Path) -> None:
    with agent(told_by("prefill")) as at:
        found = look_at(config(folder, peer_bind=at))

    assert f"cannot be bound, by the agent 'prefill-0': {TAKEN}" in found["one.peer_bind"]["found"]


def test_without_a_file_the_defaults_of_both_services_are_wanted() -> None:
    assert {"prefill-0.runtime_dir", "decode-0.runtime_dir"} <= look_at().keys()
