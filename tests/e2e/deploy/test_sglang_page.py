"""The commands and files of docs/sglang.md fit each other, the agents and the units of systemd."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.agent.config import AgentConfig, load_config
from kvbus.keys.files import read_public
from kvbus.keys.trusted import TrustedKeys
from kvbus_decode.config import DecodeConfig
from kvbus_prefill.config import PrefillConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "sglang.md").read_text("utf-8")
CONFIGS: dict[str, type[AgentConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
ROLES = pytest.mark.parametrize("role", CONFIGS)
OTHER = {"prefill": "decode", "decode": "prefill"}


def blocks(kind: str, pattern: str) -> list[str]:
    found = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return [block for block in found if re.search(pattern, block)]


def config_of(role: str, folder: Path) -> AgentConfig:
    (text,) = blocks("toml", f"^# /etc/kvbus/{role}-0.toml\n")
    path = folder / f"{role}.toml"
    path.write_text(text)
    return load_config(CONFIGS[role], path)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder that stands for /etc/kvbus, by role, after the commands for keys."""
    folders = {role: tmp_path_factory.mktemp(role) for role in CONFIGS}
    (new,), trust = blocks("bash", "keys new"), blocks("bash", "keys trust")
    public = {f"{role.upper()}_KEY": run(new, folder) for role, folder in folders.items()}
    for folder, command in zip(folders.values(), trust, strict=True):
        run(re.sub("[A-Z]+_KEY", lambda found: public[found[0]].strip(), command), folder)
    return folders


def run(command: str, folder: Path) -> str:
    here = command.replace("sudo -u kvbus /opt/kvbus/bin/", "").replace("/etc/kvbus", str(folder))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.check_output(["bash", "-e", "-c", here], env=env, text=True)  # noqa: S607


@ROLES
def test_each_agent_has_a_key_and_trusts_the_other_in_its_role(
    hosts: dict[str, Path], tmp_path: Path, role: str
) -> None:
    config, other = config_of(role, tmp_path), OTHER[role]

    key, trusted = (
        Path(name.replace("/etc/kvbus", str(hosts[role])))
        for name in (config.key_file, config.authorized_keys)
    )

    assert key.is_file()
    (one,) = TrustedKeys(trusted)
    assert (one.name, [*one.roles]) == (f"{other}-0", [other])
    assert one.key == read_public(hosts[other] / key.name)
    assert not config.insecure


@ROLES
def test_sglang_attaches_to_the_folder_that_unit_and_agent_have(tmp_path: Path, role: str) -> None:
    unit = (ROOT / "deploy" / "systemd" / f"kvbus-{role}@.service").read_text("utf-8")
    (folder,) = re.findall(r"(?m)^RuntimeDirectory=(.*)", unit)
    (command,) = blocks("bash", f"--disaggregation-mode {role} ")

    attach = re.findall(r"KVBUS_ATTACH=(\S+)", command)

    assert f"systemctl enable --now kvbus-{role}@0 " in PAGE
    assert f"/run/{folder}".replace("%i", "0") == config_of(role, tmp_path).runtime_dir
    assert attach == [str(config_of(role, tmp_path).attach_path)]


@ROLES
def test_servers_listen_where_router_and_decode_connect(tmp_path: Path, role: str) -> None:
    (command,), (router,) = (
        blocks("bash", f"--disaggregation-mode {role} "),
        blocks("bash", "launch_router"),
    )
    (host,), (port,) = (re.findall(rf"--{name} (\S+)", command) for name in ("host", "port"))
    bootstrap = re.findall(r"--disaggregation-bootstrap-port (\d+)", command)

    routed = re.findall(rf"--{role} http://(\S+):(\d+) ?(\d+)?", router)

    assert routed == [(host, port, *(bootstrap or [""]))]
    assert config_of(role, tmp_path).peer_bind.startswith(f"tcp://{host}:")
