"""What an agent does not start with it says in a line; what it says at its HTTP port once it is up.

Which values a key may have is shown in `tests/agent/test_config_sources.py`.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbus.agent.config import load_config
from kvbus_decode.config import DecodeConfig
from kvbus_prefill.config import PrefillConfig
from tests.agents import AgentProcess, until
from tests.engines import engine
from tests.faults.conftest import NOTHING, Started

KINDS: dict[str, type[Any]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
ADDRESSES = ("peer_bind", "events_bind", "http_bind")
WELL = (200, "ok\n")


def ended(agent: AgentProcess) -> tuple[int, str]:
    """How an agent that cannot start ended, and what it said."""
    agent.expected_trouble.add("not json")
    agent.launch()
    status, said = agent.exit_status(), "\n".join(agent.lines())
    assert "Traceback" not in said
    return status, said


CANNOT_START: dict[str, tuple[dict[str, Any], dict[str, str], int, str]] = {
    "no number": ({"max_handoffs": "many"}, {}, 2, "max_handoffs"),
    "no port": ({"peer_bind": "tcp://127.0.0.1:99999"}, {}, 2, "peer_bind"),
    "no address for others": ({"peer_bind": "tcp://0.0.0.0:0"}, {}, 2, "advertise_host"),
    "a long path": ({"runtime_dir": f"/dev/shm/{120 * 'x'}"}, {}, 1, "107"),  # noqa: S108
    "no room": (
        {"staging_bytes": 1 << 40},
        {},
        1,
        "error: key 'staging_bytes': a segment of 1099511627776 bytes does not fit",
    ),
    "no UCX": (
        {"mapped": False},
        {"UCX_TLS": "bogus"},
        1,
        "error: UCX does not start on data_interfaces = ['lo'], UCX_TLS=bogus: ",
    ),
    "no interface": (
        {},
        {"UCX_NET_DEVICES": "bogus0"},
        1,
        "error: UCX_NET_DEVICES: this machine has no bogus0",
    ),
}
"""Settings, environment, exit status and what is said."""


@pytest.mark.parametrize("why", CANNOT_START)
def test_an_agent_that_cannot_start_says_why_and_exits(fresh: Started, why: str) -> None:
    changes, env, wanted, told = CANNOT_START[why]
    agent = fresh.prepare("decode", env=env, **changes)
    agent.expected_trouble.add("data_plane.closed")

    status, said = ended(agent)

    assert status == wanted
    assert told in said


@pytest.mark.parametrize("taken", [*ADDRESSES, "runtime_dir"])
def test_what_another_agent_uses_is_named_and_the_other_one_lives_on(
    prefill: AgentProcess, fresh: Started, taken: str
) -> None:
    in_use = str(prefill.settings[taken])

    status, said = ended(fresh.prefill(**{taken: in_use}))

    assert status == 1
    assert said.count(in_use.removeprefix("tcp://")) == 1
    assert taken == "runtime_dir" or f"error: key '{taken}': cannot bind" in said
    assert prefill.idle()


@pytest.mark.parametrize("role", KINDS)
def test_the_printed_configuration_is_the_default_and_explains_every_key(
    role: str, tmp_path: Path
) -> None:
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
async def test_an_agent_is_ready_while_its_engine_is_there_and_not_while_it_drains(
    fresh: Started,
) -> None:
    agent = fresh.prefill(ready_needs_engine=True)
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
async def test_the_page_says_what_the_peer_socket_says_of_the_agent_and_of_an_offer(
    prefill: AgentProcess,
) -> None:
    async with engine(prefill.attach) as source:
        offer = await source.prefill.offer("r", **NOTHING)
        asked = {"offer_id": offer.offer_id}
        pages = ("/status", f"/status?offer={offer.offer_id}", f"/trace?id={offer.offer_id}")
        status, told, traced = [json.loads(prefill.page(page)[1]) for page in pages]
        same_status, same_story = prefill.status(), prefill.status(**asked)["story"]
        await offer.withdraw()

    assert status == same_status
    assert told["story"] == same_story[: len(told["story"])] != []
    assert traced["spans"][0]["name"] == "offer"


def test_a_token_keeps_strangers_out_of_all_but_the_probes(fresh: Started, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-of-some-length\n")
    agent = fresh.prefill(http_token_file=str(token))
    fresh.start(agent)

    paths = ("/status", "/metrics", "/healthz", "/readyz")
    told = {path: (agent.page(path, Authorization="")[0], agent.page(path)[0]) for path in paths}

    assert told == {path: (200 if path.endswith("z") else 401, 200) for path in paths}
    assert token.read_text().strip() not in "\n".join(agent.lines())
