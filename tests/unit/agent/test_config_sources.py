"""Sources of an agent's configuration, their order, and errors for mistakes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus.agent.config import AgentConfig, load_config
from kvbus.errors import ConfigError
from kvbus_decode.config import DecodeConfig
from kvbus_prefill.config import PrefillConfig

REQUIRED = {
    "KVBUS_AGENT_ID": "d",
    "KVBUS_PEER_BIND": "tcp://127.0.0.1:7711",
    "KVBUS_EVENTS_BIND": "tcp://127.0.0.1:7712",
}
FILE = 'agent_id = "of-file"\npeer_bind = "tcp://127.0.0.1:1"\nevents_bind = "tcp://127.0.0.1:2"\n'


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The required variables, and no other one of kvbus."""
    for name in [name for name in os.environ if name.startswith("KVBUS_")]:
        monkeypatch.delenv(name)
    for name, value in REQUIRED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "decode.toml"
    path.write_text(FILE)
    return path


def refusal(path: Path | None = None, settings: tuple[str, ...] = ()) -> str:
    """Return the error of a wrong configuration of a decode agent."""
    with pytest.raises(ConfigError) as refused:
        load_config(DecodeConfig, path, settings=settings)
    return refused.value.message


def test_variables_are_of_the_type_of_their_keys(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("KVBUS_SLICE_BYTES", "1048576")
    environment.setenv("KVBUS_LEASE_S", "2.5")
    environment.setenv("KVBUS_DATA_INTERFACES", "eth0, eth1")
    environment.setenv("KVBUS_ALLOWED_PEERS", "")
    config = load_config(DecodeConfig, None)
    assert (config.agent_id, config.peer_bind) == ("d", REQUIRED["KVBUS_PEER_BIND"])
    assert config.slice_bytes == 1 << 20
    assert config.lease_s == 2.5
    assert config.data_interfaces == ("eth0", "eth1")
    assert config.allowed_peers == ()


def test_parameters_of_backends_are_strings_in_order_of_the_backends(
    environment: pytest.MonkeyPatch, path: Path
) -> None:
    path.write_text(
        FILE + 'nixl_backends = ["LIBFABRIC", "UCX"]\n[nixl_backend_params.UCX]\nnum_workers = 2\n'
        'ucx_devices = "mlx5_0:1"\nucx_ep_close_force = true\n'
    )
    told = "LIBFABRIC.num_threads=4, UCX.num_workers=1"

    of_file = load_config(DecodeConfig, path)
    told_both = load_config(DecodeConfig, path, settings=[f"nixl_backend_params={told}"])

    ucx = {"num_workers": "2", "ucx_devices": "mlx5_0:1", "ucx_ep_close_force": "true"}
    assert list(of_file.backends.items()) == [("LIBFABRIC", {}), ("UCX", ucx)]
    assert told_both.backends == {"LIBFABRIC": {"num_threads": "4"}, "UCX": {"num_workers": "1"}}


def test_setting_wins_over_variable_over_file(environment: pytest.MonkeyPatch, path: Path) -> None:
    path.write_text(FILE + "lease_s = 1.0\nheartbeat_s = 1.0\nidle_peer_s = 1.0\n")
    environment.setenv("KVBUS_HEARTBEAT_S", "2")
    environment.setenv("KVBUS_IDLE_PEER_S", "2")
    config = load_config(DecodeConfig, path, settings=["idle_peer_s=3", "agent_id=a"])
    assert (config.lease_s, config.heartbeat_s, config.idle_peer_s) == (1.0, 2.0, 3.0)
    assert (config.agent_id, config.peer_bind) == ("a", REQUIRED["KVBUS_PEER_BIND"])


WRONG = [
    ("variable", "KVBUS_PER_BIND=x", "did you mean KVBUS_PEER_BIND?"),
    ("variable", "KVBUS_OFFER_TTL_S=1", "KVBUS_OFFER_TTL_S is the variable of no key"),
    ("variable", "KVBUS_MAX_HANDOFFS=many", "KVBUS_MAX_HANDOFFS: key 'max_handoffs': "),
    ("variable", "KVBUS_PATH=maybe", "KVBUS_PATH: key 'path': "),
    ("variable", "KVBUS_PEER_BIND=127.0.0.1:1", "KVBUS_PEER_BIND: key 'peer_bind': "),
    ("variable", "KVBUS_STAGING_BYTES=1", "KVBUS_STAGING_BYTES: key 'staging_bytes': "),
    ("variable", "KVBUS_AGENT_ID=", "expected 1 to 64 letters of ASCII, digits, dots, "),
    (
        "variable",
        "KVBUS_PEER_BIND=tcp://0.0.0.0:7701 KVBUS_ADVERTISE_HOST=fd00:7::1",
        "binds IPv4 alone, and advertise_host is IPv6: write tcp://*:PORT",
    ),
    ("setting", "lease", "--set lease: not key=value"),
    ("setting", "lease=1", "did you mean lease_s?"),
    ("setting", "slice_byte=1", "did you mean slice_bytes?"),
    ("setting", "lease_s=-1", "--set lease_s: key 'lease_s': "),
    ("setting", "log_level=loud", "key 'log_level': 'loud': expected one of debug, info, warning"),
    ("setting", "advertise_host=tcp://host", "'tcp://host' is neither a host name nor an IP "),
    ("setting", "advertise_host=10.0.0.1:7701", "it has no tcp:// and no port"),
    ("setting", "staging_bytes=1024 slot_bytes=4096", "'staging_bytes': 1024 "),
    ("setting", "staging_bytes=1024 slot_bytes=4096", " 'slot_bytes' = 4096"),
    ("file", "slot_bytes = 1", "key 'slot_bytes'"),
    ("file", "[transport]\nslice_bytes = 4096", "a decode agent has no key 'transport'"),
    ("file", "offer_ttl_s = 1", "no key 'offer_ttl_s'; --print-config has them all"),
    ("file", "path = 'fast'", "'fast': expected one of auto, direct, staged, packed, mapped"),
    ("file", "otlp_endpoint = 'x'", "'otlp_endpoint': 'x': expected http://HOST:PORT or https:"),
    ("file", "peers = ['10.0.0.1:7701']", "expected tcp://HOST:PORT for each, and behind"),
    ("file", "nixl_backends = []", "key 'nixl_backends'"),
    ("file", "nixl_backends = ['../UCX']", "expected names such as UCX or LIBFABRIC"),
    ("file", "nixl_backends = ['UCX', 'UCX']", "key 'nixl_backends': named twice: UCX"),
    ("file", "[nixl_backend_params]\nUCX = 1", "key 'nixl_backend_params'"),
    (
        "file",
        "[nixl_backend_params.LIBFABRIC]\nnum_threads = 1",
        "'nixl_backend_params': LIBFABRIC is not among nixl_backends, which has UCX",
    ),
    ("variable", "KVBUS_NIXL_BACKEND_PARAMS=num_workers=2", "'num_workers=2' is not NAME.KEY=VAL"),
    ("setting", "nixl_backend_params=UCX.num_workers", "'UCX.num_workers' is not NAME.KEY=VALUE"),
    ("setting", "gpu_slots=pinned", "'pinned': expected one of auto, host, gpu"),
    ("file", "http_bind = '[::]:99999'", "is not HOST:PORT, with a port up to 65535"),
]


@pytest.mark.parametrize(("source", "text", "told"), WRONG)
def test_what_is_wrong_is_told_in_words_with_its_source_and_key(
    environment: pytest.MonkeyPatch, path: Path, source: str, text: str, told: str
) -> None:
    if source == "file":
        environment.setenv("KVBUS_SLICE_BYTES", "1048576")
        path.write_text(FILE + text)
        said = refusal(path)
        assert said.startswith(f"{path}: ")
    elif source == "variable":
        for one in text.split(" "):
            environment.setenv(*one.split("=", 1))
        said = refusal()
    else:
        said = refusal(settings=tuple(text.split(" ")))
    assert told in said


@pytest.mark.parametrize("host", ["fd00:7::1", "[fd00:7::1]", "fe80::1%eth0"])
def test_ipv6_address_may_have_brackets(environment: pytest.MonkeyPatch, host: str) -> None:
    """Kubernetes names the address of a pod without."""
    environment.setenv("KVBUS_ADVERTISE_HOST", host)
    environment.setenv("KVBUS_PEER_BIND", f"tcp://{host}:7701-7709")
    config, bracketed = load_config(DecodeConfig, None), f"[{host.strip('[]')}]"
    assert (config.advertise_host, config.peer_bind) == (bracketed, f"tcp://{bracketed}:7701-7709")


def test_foreign_or_missing_key_is_named(environment: pytest.MonkeyPatch, path: Path) -> None:
    path.write_text(FILE + "fetch_timeout_s = 1.0\n")
    with pytest.raises(ConfigError, match="a prefill agent has no key 'fetch_timeout_s'"):
        load_config(PrefillConfig, path)
    environment.delenv("KVBUS_AGENT_ID")
    with pytest.raises(ConfigError, match=r"key 'agent_id' is missing.*KVBUS_AGENT_ID"):
        load_config(DecodeConfig, None)


def test_variables_of_commands_and_engines_are_ignored(environment: pytest.MonkeyPatch) -> None:
    of_keys = {variable(key) for kind in (PrefillConfig, DecodeConfig) for key in keys_of(kind)}
    others = named_variables() - of_keys
    assert {"KVBUS_ATTACH", "KVBUS_ENGINE_ID", "KVBUS_MODEL"} <= others
    for name in others:
        environment.setenv(name, "tcp://10.0.0.1:80")
    assert load_config(DecodeConfig, None).agent_id == "d"


def named_variables() -> set[str]:
    """All variables of kvbus in its code and pages; ``KVBUS_KEY`` stands for any."""
    root, named = Path(__file__).parents[3], set[str]()
    for folder, pattern in (("kvbus", "*.py"), ("services", "*.py"), ("docs", "*.md")):
        for path in (root / folder).rglob(pattern):
            named |= set(re.findall(r"\bKVBUS_[A-Z_]*[A-Z]\b", path.read_text()))
    return named - {"KVBUS_KEY"}


def variable(key: str) -> str:
    return f"KVBUS_{key.upper()}"


def keys_of(kind: type[AgentConfig]) -> set[str]:
    return {one.name for one in msgspec.structs.fields(kind)}


@pytest.mark.parametrize("kind", [PrefillConfig, DecodeConfig])
def test_every_key_can_be_set(environment: pytest.MonkeyPatch, kind: type[AgentConfig]) -> None:
    binds = {"peer_bind": "tcp://127.0.0.1:1", "events_bind": "tcp://127.0.0.1:2"}
    own: dict[str, Any] = {"agent_id": "a", **binds}
    default = kind(**own)
    for name, value in own.items():
        environment.setenv(variable(name), value)
    for key in keys_of(kind):
        value = getattr(default, key)
        text = ",".join(value) if isinstance(value, tuple | dict) else str(value).lower()
        assert load_config(kind, None, settings=[f"{key}={text}"]) == default
        with environment.context() as there:
            there.setenv(variable(key), text)
            assert load_config(kind, None) == default


def test_number_of_config_keys_of_both_agents_stays_capped() -> None:
    """An operator has to know each key: a value that nobody changes is a constant."""
    assert len(keys_of(PrefillConfig) | keys_of(DecodeConfig)) <= 50


STARTED = """
import sys
import kvbus_decode.__main__, kvbus_prefill.__main__
from kvbus.agent.observe import configure_logs
configure_logs(level="info", style="console", agent="a")
print([name for name in ("torch", "rich.console") if name in sys.modules])
"""


def test_agents_start_without_torch_and_without_rich() -> None:
    program = [sys.executable, "-c", STARTED]
    assert subprocess.check_output(program, text=True, timeout=60) == "[]\n"


def test_the_command_refuses_a_wrong_setting(environment: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "kvbus_decode", "--set", "lease_z=1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "error: --set lease_z: there is no such key; did you mean lease_s?\n"
