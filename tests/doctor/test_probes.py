"""What the probes find here: real memory, real limits, real processes, real ports and folders."""

import json
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from kvbus.agent.process.config import AgentConfig, convert_config, load_shared_config
from kvbus.agent.process.defaults import DECODE_DEFAULTS, PREFILL_DEFAULTS
from kvbus.doctor.agents import agent_facts, wanted_agents
from kvbus.doctor.children import PROBE, Budget, run_alone
from kvbus.doctor.command import Family, run_checks
from kvbus.doctor.cuda import check_cuda
from kvbus.doctor.finding import Finding, Severity, exit_status_of
from kvbus.doctor.host import check_memory, check_processes
from kvbus.doctor.nixl import check_nixl, measured_reads
from kvbus.doctor.process import read_memory
from kvbus.doctor.versions import check_versions
from kvbus.errors import ConfigError
from kvbus.memory import is_compiled
from kvbus.spawn import free_port
from kvbus_decode.config import DecodeConfig
from kvbus_prefill.config import PrefillConfig
from tests.agents import AgentProcess

LIMITS = """
import json, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))
from kvbus.doctor.host import check_limits
print(json.dumps({key: one for found in check_limits() for key, one in found.values.items()}))
"""


class Room(msgspec.Struct):
    available_bytes: int
    total_bytes: int


class NixlBackends(msgspec.Struct):
    backends: dict[str, list[str]]
    ucx_transports: list[str]


def budget() -> Budget:
    return Budget(60, 30)


def config(tmp_path: Path, **keys: object) -> AgentConfig:
    fields = {
        "agent_id": "here",
        "peer_bind": "tcp://127.0.0.1:0",
        "events_bind": "tcp://127.0.0.1:0",
        "runtime_dir": str(tmp_path / "run"),
        **keys,
    }
    return convert_config(AgentConfig, fields, source="a test")


def by_name(found: Iterable[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in found}


def test_the_versions_of_this_environment_are_found() -> None:
    found = by_name(check_versions())

    assert found.keys() == {"versions.python", "versions.packages"}
    assert "nixl" in found["versions.packages"].values
    assert "pytest" not in found["versions.packages"].values


def test_memory_of_this_machine_makes_sense() -> None:
    found = by_name(check_memory())

    assert found.keys() == {
        *("memory.segment", "memory.room", "memory.shared_folder"),
        *("memory.huge_pages", "memory.cores", "memory.copies"),
    }
    assert found["memory.copies"].values == {"compiled": is_compiled()}
    values = msgspec.convert(found["memory.room"].values, Room)
    assert 0 < values.available_bytes <= values.total_bytes
    assert found["memory.segment"].severity is Severity.OK
    assert msgspec.convert(found["memory.cores"].values["num_cores"], int) >= 1


def test_limits_are_those_of_the_process() -> None:
    printed = subprocess.run([sys.executable, "-c", LIMITS], stdout=subprocess.PIPE, check=True)

    facts = json.loads(printed.stdout)

    assert (facts["open_files"], facts["locked_bytes"]) == (100, 8192)
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert facts["file_bytes"] == (None if soft == resource.RLIM_INFINITY else soft)


def test_processes_are_tried_and_not_guessed() -> None:
    (found,) = check_processes(budget())

    scope = msgspec.convert(found.values["ptrace_scope"], int | None)
    may = found.values["may_trace"] or (scope or 0) <= 1
    assert (found.severity is Severity.OK) == may


def test_memory_that_cannot_be_read_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), 8, 16)


def test_a_transport_that_does_not_work_has_a_reason_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "sm,self")
    said: list[str] = []

    findings = run_checks([Family.NIXL], [], budget(), said.append)

    found = {one.name: one for one in findings}
    reads = {name.rpartition(".")[2] for name in found if name.startswith("nixl.read.")}
    assert reads == {"configured", "shared_memory", "tcp"}
    configured, tcp = found["nixl.read.configured"], found["nixl.read.tcp"]
    assert (configured.severity, tcp.severity) == (Severity.ERROR, Severity.OK)
    assert exit_status_of(findings, strict=False) == 1
    assert configured.values["bytes_per_s"] is None
    assert "no peer failure handler" in configured.found
    assert str(tcp.values["wire"]).startswith("tcp/")
    for name in ("nixl.read.shared_memory", "nixl.read.tcp"):
        assert msgspec.convert(found[name].values["bytes_per_s"], float) > 1e6
    assert said == [
        "nixl",
        "a NIXL READ, configured",
        "a NIXL READ, shared memory",
        "a NIXL READ, tcp",
    ]
    assert found["nixl.installed"].values["ucx_version"]
    backends = msgspec.convert(found["nixl.backends"].values, NixlBackends)
    assert "DRAM_SEG" in backends.backends["UCX"]
    assert "tcp" in backends.ucx_transports


def test_nixl_that_takes_too_long_is_given_up() -> None:
    reads = list(measured_reads(Budget(0.2, 0.1), lambda _: None))
    (found,) = check_nixl(Budget(0.1, 0.1), lambda _: None)

    assert all("no answer within" in one.error for one in reads)
    assert "no answer within" in found.found


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this is about machines without a GPU")
def test_torch_without_a_gpu_says_so_in_the_end() -> None:
    listed = run_alone(PROBE, "cuda", "list", env={}, budget=budget())
    shared = run_alone(PROBE, "cuda", "target", env={}, budget=budget())

    assert "CUDA" in listed.failure or "NVIDIA" in listed.failure
    assert "CUDA" in shared.failure or "NVIDIA" in shared.failure


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this is about machines without a GPU")
def test_without_a_gpu_there_is_one_note() -> None:
    (found,) = check_cuda(budget())

    assert found.severity is Severity.NOTE


def test_a_port_that_is_taken_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        facts = agent_facts(
            "a test",
            config(
                tmp_path,
                events_bind=f"tcp://127.0.0.1:{port}",
                http_bind=f"127.0.0.1:{free_port()}",
            ),
        )

    errors = {bind.key: bind.error for bind in facts.binds}
    assert errors == {
        "peer_bind": "",
        "events_bind": os.strerror(98),
        "http_bind": "",
    }


def test_of_a_range_of_ports_one_has_to_be_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", port := free_port())):
        errors = [
            agent_facts("a test", config(tmp_path, events_bind=f"tcp://127.0.0.1:{ports}")).binds[1]
            for ports in (f"{port}-{port}", f"{port}-{port + 50}")
        ]

    assert [bind.error for bind in errors] == [os.strerror(98), ""]


@pytest.mark.parametrize("address", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://lo:0"])
def test_every_form_of_an_address_can_be_tried(tmp_path: Path, address: str) -> None:
    facts = agent_facts("a test", config(tmp_path, peer_bind=address, advertise_host="here"))

    assert facts.binds[0].error == ""


@pytest.mark.parametrize("host", ["*", "lo", "localhost"])
def test_a_port_that_is_taken_is_found_by_every_form(tmp_path: Path, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://{host}:{taken.getsockname()[1]}"
        facts = agent_facts("a test", config(tmp_path, events_bind=address, advertise_host="here"))

    assert facts.binds[1].error == os.strerror(98)


def test_what_zeromq_cannot_bind_is_an_error(tmp_path: Path) -> None:
    facts = agent_facts("a test", config(tmp_path, peer_bind="tcp://[::1]:0"))

    assert facts.binds[0].error


def test_a_host_that_is_not_ours_cannot_be_bound(tmp_path: Path) -> None:
    facts = agent_facts("a test", config(tmp_path, peer_bind="tcp://192.0.2.1:7701"))

    assert facts.binds[0].error == os.strerror(99)


def test_a_token_that_others_can_read_is_said(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    token.chmod(0o644)
    wanted = config(tmp_path, http_bind="127.0.0.1:0", http_token_file=str(token))
    facts = agent_facts("a test", wanted)

    assert "http_token_file" in facts.keys_error


def test_an_agent_that_runs_already_is_known(tmp_path: Path) -> None:
    settings = {
        "agent_id": "here",
        "peer_bind": "tcp://127.0.0.1:0",
        "events_bind": "tcp://127.0.0.1:0",
        "runtime_dir": str(tmp_path / "run"),
        "log_format": "json",
    }
    agent = AgentProcess("prefill", tmp_path, tmp_path / "log", settings)
    try:
        agent.start()
        facts = agent_facts("a test", config(tmp_path, peer_bind=agent.peer))
        ports = f"{agent.peer}-{min(65_535, int(agent.peer.rpartition(':')[2]) + 2)}"
        of_range = agent_facts("a test", config(tmp_path, peer_bind=ports))
    finally:
        agent.ask_to_end()
        agent.end()

    assert facts.is_running
    assert of_range.is_running
    assert facts.folder_error == ""
    assert agent.exit_status() == 0


def test_trying_a_folder_leaves_nothing(tmp_path: Path) -> None:
    facts = agent_facts("a test", config(tmp_path, runtime_dir=str(tmp_path / "deep" / "run")))

    assert facts.folder_error == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)

    facts = agent_facts("a test", config(tmp_path))

    assert facts.folder_error == ""
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)

    facts = agent_facts("a test", config(tmp_path))

    assert "mode 0755" in facts.folder_error


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    facts = agent_facts("a test", config(tmp_path, runtime_dir=str(tmp_path / ("x" * 100))))

    assert "Linux allows 107" in facts.folder_error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [PrefillConfig, DecodeConfig])
def test_the_shared_keys_of_each_role_are_read_from_its_file(
    tmp_path: Path, kind: type[AgentConfig]
) -> None:
    path = tmp_path / "agent.toml"
    own = msgspec.structs.fields(kind)[-1]
    path.write_text(
        'agent_id = "a"\npeer_bind = "tcp://h:1"\nevents_bind = "tcp://h:2"\nstaging_bytes = 0\n'
        f"{own.encode_name} = 1\n"
    )

    found = load_shared_config(path)

    assert (found.agent_id, found.peer_bind, found.staging_bytes) == ("a", "tcp://h:1", 0)


def test_shared_keys_that_are_wrong_are_named(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('agent_id = "a"\npeer_bind = 7\nevents_bind = "tcp://h:2"\n')

    with pytest.raises(ConfigError, match="key 'peer_bind'"):
        load_shared_config(path)


def test_without_a_file_the_defaults_of_both_services_are_wanted() -> None:
    wanted = [found for _, found in wanted_agents([])]

    assert [one.agent_id for one in wanted] == ["prefill-0", "decode-0"]
    assert [one.peer_bind for one in wanted] == [
        PREFILL_DEFAULTS["peer_bind"],
        DECODE_DEFAULTS["peer_bind"],
    ]
