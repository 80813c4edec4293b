"""Settings that an agent refuses in one line, and its HTTP port.

`tests/unit/agent/test_config_sources.py` tests the values of each key.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbus.agent.config import load_config
from kvbus.spawn import free_port
from kvbus_decode.config import DecodeConfig
from kvbus_prefill.config import PrefillConfig
from tests.process.faults.conftest import Started
from tests.support.agents import AgentProcess, until
from tests.support.engines import NOTHING, engine, hand_over, pair
from tests.support.keyring import KeyRing
from tests.support.plain_sockets import ask

KINDS: dict[str, type[Any]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
ADDRESSES = ("peer_bind", "events_bind", "http_bind")
WELL = (200, "ok\n")


Refused = tuple[str, dict[str, Any], str]
EXPOSED = {"peer_bind": "tcp://0.0.0.0:0", "advertise_host": "host"}
EVENTS_ALONE = {"peer_bind": "tcp://127.0.0.1:0", "events_bind": "tcp://0.0.0.0:0"}
USAGE = {"no number", "no port", "no address for others", "more peers than places"}
"""These end with status 2."""
TOKEN = "a-token-of-some-length"


def refused(folder: Path) -> dict[str, Refused]:
    ring = KeyRing(folder)
    keys, readable = ring.settings("p"), ring.settings("readable")
    ring.secret_path("readable").chmod(0o644)
    files = {"short": b"short", "long": b"x" * 5000, "shared": b"k" * 32}
    for name, key in files.items():
        (folder / name).write_bytes(key + b"\n")
        (folder / name).chmod(0o640 if name == "shared" else 0o600)

    def tickets(name: str, said: str, role: str = "prefill") -> Refused:
        return role, {"ticket_keys": [str(folder / name)]}, f"'ticket_keys'.*{said}"

    def alone(key: str) -> dict[str, Any]:
        return {key: keys[key]}

    def env(**variables: str) -> dict[str, Any]:
        return {"env": variables, "mapped": False}

    def token(content: bytes | None, said: str, mode: int = 0o600) -> Refused:
        path = folder / f"token-{said}"
        if content is not None:
            path.write_bytes(content)
            path.chmod(mode)
        settings = {"http_bind": "0.0.0.0:0", "http_token_file": str(path)}
        return "prefill", settings, f"'http_token_file'.*{re.escape(str(path))}.*{said}"

    long_path = f"/dev/shm/{120 * 'x'}"  # noqa: S108 - nothing is made there
    insecure = {**EXPOSED, "insecure": True}
    return {
        "no number": ("decode", {"max_handoffs": "many"}, "max_handoffs"),
        "no port": ("decode", {"peer_bind": "tcp://127.0.0.1:99999"}, "peer_bind"),
        "more peers than places": (
            "decode",
            {"peers": [f"tcp://10.0.0.{n}:7701" for n in range(3)], "max_peers": 2},
            "key 'peers': lists 3 agents, .*; raise max_peers to 3 or more",
        ),
        "no address for others": ("decode", {"peer_bind": "tcp://0.0.0.0:0"}, "advertise_host"),
        "a long path": ("decode", {"runtime_dir": long_path}, "107"),
        "no room": (
            "decode",
            {"staging_bytes": 1 << 40},
            "error: key 'staging_bytes': a segment of 1099511627776 bytes does not fit",
        ),
        "no UCX": (
            "decode",
            env(UCX_TLS="bogus"),
            r"error: UCX does not start on data_interfaces = \['lo'\]: .*UCX_TLS=bogus",
        ),
        "a backend that NIXL lacks": (
            "decode",
            {"nixl_backends": ["UCX", "Mooncake"], "mapped": True},
            "error: key 'nixl_backends': backend 'Mooncake' cannot be loaded: .* NIXL has .*UCX",
        ),
        "a backend for files": (
            "prefill",
            {"nixl_backends": ["POSIX"], "mapped": False},
            "error: key 'nixl_backends': backend 'POSIX' is for storage",
        ),
        "a parameter that UCX lacks": (
            "prefill",
            env(KVBUS_NIXL_BACKEND_PARAMS="UCX.workers=2"),
            "error: key 'nixl_backend_params': backend 'UCX' has no workers; it has .*num_workers",
        ),
        "a wrong value for UCX": (
            "decode",
            {**env(KVBUS_NIXL_BACKEND_PARAMS="UCX.num_workers=x"), "mapped": False},
            "error: UCX does not start on .*: no NIXL backend UCX num_workers=x",
        ),
        "no interface": (
            "decode",
            env(UCX_NET_DEVICES="bogus0"),
            "error: UCX_NET_DEVICES: this machine has no bogus0",
        ),
        "peers without keys": ("prefill", EXPOSED, "insecure = true"),
        "events without keys": ("decode", {**EXPOSED, **EVENTS_ALONE}, "insecure = true"),
        "a key and nobody trusted": ("prefill", alone("key_file"), "'authorized_keys': needed"),
        "trust without a key": ("prefill", alone("authorized_keys"), "'key_file': needed"),
        "a key that others read": ("prefill", readable, "others can read the secret in it"),
        "ticket keys that others read": tickets("shared", "others can read the secret in it"),
        "a ticket key that is short": tickets("short", "has a key of 5 bytes; 32 at least"),
        "a ticket key that is long": tickets("long", "larger than 4096 bytes"),
        "no ticket key to sign": tickets("none", "cannot read"),
        "no ticket key to check": tickets("none", "cannot read", "decode"),
        "a token that is short": token(b"short\n", "16 to 1024"),
        "a token of two lines": token(b"two lines of it\nand more", "one line"),
        "a token that is no ASCII": token("nicht-nur-ä-sondern-auch-ö".encode(), "printable"),
        "a token that others read": token(TOKEN.encode(), "chmod 0600", 0o644),
        "a token that is not there": token(None, "No such file"),
        "a port without a token": ("decode", {"http_bind": "0.0.0.0:0"}, "'http_token_file'"),
        "any interface for KV": ("prefill", insecure, "'data_interfaces': needed"),
        "any interface, with keys": ("decode", {**EXPOSED, **keys}, "'data_interfaces': needed"),
        "an interface that is not there": (
            "prefill",
            {"data_interfaces": ["lo", "eth99", "ib_7:1"]},
            "has no eth99, ib_7:1; it has .*lo",
        ),
    }


def test_unusable_or_unsafe_setting_is_refused_at_start_by_key(
    fresh: Started, tmp_path: Path
) -> None:
    wrong = refused(tmp_path)
    launched = {why: fresh.prepare(role, **settings) for why, (role, settings, _) in wrong.items()}
    for agent in launched.values():
        agent.expected_trouble |= {"not json", "data_plane.closed"}
        agent.launch()
    for why, (_, _, told) in wrong.items():
        status, said = ended(launched[why])
        assert status == (2 if why in USAGE else 1), (why, said)
        assert re.search(told, said), (why, said)
        assert TOKEN not in said


def ended(agent: AgentProcess) -> tuple[int, str]:
    status, said = agent.exit_status(), "\n".join(agent.lines())
    assert "Traceback" not in said
    return status, said


def writers_in(folder: Path) -> set[str]:
    return {path.name.rpartition("-")[0] for path in folder.iterdir()}


@pytest.mark.anyio
async def test_agents_hand_off_in_environment_of_other_programs(
    fresh: Started, tmp_path: Path
) -> None:
    others = {
        "KVBUS_ENGINE_ID": "prefill-0",
        "KVBUS_MODEL": "llama",
        "NIXL_TELEMETRY_DIR": str(tmp_path),
        "NIXL_TELEMETRY_ENABLE": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "of-vllm"),
    }
    (tmp_path / "of-vllm").mkdir()
    is_missing = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing")}
    prefill, decode = fresh.both({"env": others}, {"env": others | is_missing})
    async with pair(prefill.attach, decode.attach) as engines:
        fetched = await hand_over(*engines)
    assert fetched.path == "direct"
    assert prefill.metric("event_loop_lag_seconds_count") > 0
    assert not list((tmp_path / "of-vllm").iterdir())
    assert {agent.settings["agent_id"] for agent in (prefill, decode)} <= writers_in(tmp_path)


@pytest.mark.anyio
async def test_a_wildcard_bind_is_reached_over_ipv6_and_over_ipv4(fresh: Started) -> None:
    everywhere = {
        "peer_bind": "tcp://*:0",
        "events_bind": "tcp://*:0",
        "advertise_host": "::1",
        "data_interfaces": ["lo"],
        "http_bind": f"0.0.0.0:{free_port()}",
        "insecure": True,
    }
    prefill, decode = fresh.both(everywhere)
    async with pair(prefill.attach, decode.attach) as engines:
        fetched = await hand_over(*engines)
    assert fetched.path == "direct"
    assert prefill.page("/metrics")[0] == 200
    assert prefill.peer.startswith("tcp://[::1]:")
    over_ipv4 = prefill.peer.replace("[::1]", "127.0.0.1")
    assert ask(over_ipv4, "status", {})["ok"]["counts"]["offers"] == 0


def test_second_agent_names_setting_in_use_and_first_lives_on(
    prefill: AgentProcess, fresh: Started
) -> None:
    keys = (*ADDRESSES, "runtime_dir")
    in_use: dict[str, Any] = {key: str(prefill.settings[key]) for key in keys}
    others = {key: fresh.prepare("prefill", **{key: in_use[key]}) for key in keys}
    for agent in others.values():
        agent.expected_trouble.add("not json")
        agent.launch()
    for key, agent in others.items():
        status, said = ended(agent)
        assert status == 1
        assert said.count(in_use[key].removeprefix("tcp://")) == 1
        assert key == "runtime_dir" or f"error: key '{key}': cannot bind" in said
    assert prefill.idle()


@pytest.mark.parametrize("role", KINDS)
def test_printed_config_is_default_and_explains_every_key(role: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"kvbus_{role}", "--print-config"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout
    path, lines = tmp_path / "agent.toml", printed.splitlines()
    path.write_text(printed)
    config = load_config(KINDS[role], path)
    required = {"agent_id": f"{role}-0", **{key: getattr(config, key) for key in ADDRESSES}}
    assert config == KINDS[role](**required)
    assert all(
        lines[number - 1].startswith("# ") for number, line in enumerate(lines) if " = " in line
    )


@pytest.mark.anyio
async def test_agent_is_ready_with_engine_and_not_while_draining(fresh: Started) -> None:
    agent = fresh.prepare("prefill", ready_needs_engine=True)
    fresh.start(agent)
    before, alive = agent.page("/readyz"), agent.page("/healthz")
    async with engine(agent.attach):
        during = agent.page("/readyz")
    await until(lambda: agent.page("/readyz") == before)
    async with engine(agent.attach) as source:
        offer = await source.prefill.offer("r", **NOTHING)
        agent.signal(signal.SIGTERM)
        await until(lambda: agent.status()["draining"])
        draining, still_alive = agent.page("/readyz"), agent.page("/healthz")
        await offer.withdraw()
    await until(lambda: not agent.alive)
    assert (before[0], "no engine" in before[1]) == (503, True)
    assert alive == during == still_alive == WELL
    assert (draining[0], "draining" in draining[1]) == (503, True)


@pytest.mark.anyio
async def test_http_page_and_peer_socket_agree_on_agent_and_offer(prefill: AgentProcess) -> None:
    async with engine(prefill.attach) as source:
        offer = await source.prefill.offer("r", **NOTHING)
        asked = {"offer_id": offer.offer_id}
        pages = ("/status", f"/status?offer={offer.offer_id}", f"/trace?id={offer.offer_id}")
        status, told, traced = [json.loads(prefill.page(page)[1]) for page in pages]
        same_status, same_story = prefill.status(), prefill.status(**asked)["history"]
        await offer.withdraw()
    assert status == same_status
    assert told["history"] == same_story[: len(told["history"])] != []
    assert traced["spans"][0]["name"] == "offer"
