"""What is said of machines: the findings of each family on good ones, bad ones and drawn ones."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.doctor.agent_network import keys_finding
from kvbus.doctor.agents import AgentFacts, Bind, agent_findings
from kvbus.doctor.cuda import allocator_finding, gpus_finding, ipc_finding, no_gpu_finding
from kvbus.doctor.finding import Finding, Severity
from kvbus.doctor.host import (
    core_finding,
    file_size_finding,
    folder_finding,
    huge_page_finding,
    kernel_finding,
    locked_memory_finding,
    open_files_finding,
    reading_finding,
    room_finding,
    segment_finding,
)
from kvbus.doctor.nixl import (
    ReadFacts,
    UcxChoice,
    backends_finding,
    installed_finding,
    read_findings,
)
from kvbus.doctor.process import GpuList, NixlList
from kvbus.doctor.versions import package_findings, python_finding
from tests.doctor import drawn

MIB, GIB = 1 << 20, 1 << 30
OK, NOTE, WARNING, ERROR = Severity
REFUSED = "Operation not permitted"
GOOD_NIXL = NixlList("1.5.1", {"UCX": ("DRAM_SEG", "VRAM_SEG"), "GDS": ()})


def check_one_agent(agent: AgentFacts) -> Iterable[Finding]:
    return agent_findings([agent], available_bytes=GIB)


@pytest.mark.parametrize("findings", drawn.FINDINGS)
@given(data=st.data())
def test_whatever_the_machine_complaints_have_a_fix_and_names_are_unique(
    findings: st.SearchStrategy[Iterable[Finding]], data: st.DataObject
) -> None:
    found = list(data.draw(findings))

    assert all(one.found for one in found)
    assert all(one.why and one.fix for one in found if one.is_complaint)
    assert not any(one.fix or one.command for one in found if one.severity is OK)
    assert len({one.name for one in found}) == len(found)
    assert json.loads(json.dumps([dict(one.values) for one in found])) if found else True


def severities(found: Iterable[Finding]) -> dict[str, Severity]:
    return {one.name: one.severity for one in found}


def one_of(found: Iterable[Finding], name: str) -> Finding:
    return next(one for one in found if one.name == name)


def room(available_bytes: int) -> Finding:
    return room_finding(available_bytes, total_bytes=64 * GIB, group_limit_bytes=None)


def locked(limit: int | None, may_lock: bool, *rdma_devices: str) -> Finding:
    return locked_memory_finding(limit, may_lock=may_lock, rdma_devices=rdma_devices)


def gpus(seen: GpuList, error: str = "") -> Finding:
    return gpus_finding(seen, error, num_devices=1, driver="570.86.15", torch_version="2.13.0")


@pytest.mark.parametrize(
    "found",
    [
        python_finding("3.11.7", ">=3.11", "Linux 6.1 x86_64"),
        *package_findings(drawn.REQUIRED, {"nixl": "1.5.1", "torch": "2.13.0+cpu"}),
        segment_finding(""),
        room(32 * GIB),
        folder_finding(32 * GIB, 32 * GIB),
        huge_page_finding(0, 2 * MIB, "within_size"),
        core_finding(16, None),
        kernel_finding(compiled=True),
        open_files_finding(65536),
        locked(None, False),
        file_size_finding(None),
        reading_finding("", ptrace_scope=1, may_trace=False),
        installed_finding("", GOOD_NIXL, "1.23.0"),
        backends_finding(GOOD_NIXL.backends, ("cma", "tcp")),
        gpus(drawn.GPUS),
        ipc_finding(""),
        allocator_finding(""),
    ],
)
def test_a_good_machine_is_all_right(found: Finding) -> None:
    assert found.severity is OK


def test_a_package_that_is_too_new_or_missing_is_an_error_with_its_command() -> None:
    found = list(package_findings(drawn.REQUIRED, {"nixl": "2.0.0"}))

    assert severities(found) == {
        "versions.nixl": ERROR,
        "versions.torch": ERROR,
        "versions.packages": OK,
    }
    assert one_of(found, "versions.nixl").command == "pip install 'nixl<2,>=1.5.1'"
    assert "torch is not installed" in one_of(found, "versions.torch").found


@pytest.mark.parametrize("torch", ["2.7.0a0+7c8ec84dab.nv25.03", "2.13.0+cpu"])
def test_builds_of_a_vendor_are_what_is_required(torch: str) -> None:
    found = package_findings(drawn.REQUIRED, {"nixl": "1.5.1", "torch": torch})

    assert severities(found) == {"versions.packages": OK}


def test_an_old_python_is_an_error() -> None:
    assert python_finding("3.10.9", ">=3.11", "Linux").severity is ERROR


@pytest.mark.parametrize(
    ("found", "name", "expected"),
    [
        (room(2 * GIB), "memory.room", OK),
        (room(2 * GIB - 1), "memory.room", WARNING),
        (folder_finding(32 * GIB, 64 * MIB), "memory.shared_folder", NOTE),
        (folder_finding(None, None), "memory.shared_folder", NOTE),
        (segment_finding(REFUSED), "memory.segment", ERROR),
        (huge_page_finding(0, 2 * MIB, "never"), "memory.huge_pages", NOTE),
        (huge_page_finding(1, 2 * MIB, "never"), "memory.huge_pages", OK),
        (core_finding(1, None), "memory.cores", WARNING),
        (core_finding(16, 1.5), "memory.cores", WARNING),
        (core_finding(16, 2.0), "memory.cores", OK),
        (kernel_finding(compiled=False), "memory.copies", NOTE),
    ],
)
def test_memory_is_complained_of_by_what_it_costs(
    found: Finding, name: str, expected: Severity
) -> None:
    assert (found.name, found.severity) == (name, expected)


@pytest.mark.parametrize(
    ("found", "name", "expected"),
    [
        (open_files_finding(4096), "limits.open_files", OK),
        (open_files_finding(1024), "limits.open_files", NOTE),
        (open_files_finding(1023), "limits.open_files", WARNING),
        (open_files_finding(63), "limits.open_files", ERROR),
        (open_files_finding(None), "limits.open_files", OK),
        (locked(8 * MIB, False), "limits.locked_memory", OK),
        (file_size_finding(GIB), "limits.file_size", WARNING),
    ],
)
def test_limits_are_complained_of_by_what_they_allow(
    found: Finding, name: str, expected: Severity
) -> None:
    assert (found.name, found.severity) == (name, expected)


@pytest.mark.parametrize(
    ("locked_bytes", "may_lock", "expected"),
    [
        (8 * MIB, False, WARNING),
        (8 * MIB, True, OK),
        (None, False, OK),
    ],
)
def test_locked_memory_matters_where_there_is_rdma(
    locked_bytes: int | None, may_lock: bool, expected: Severity
) -> None:
    assert locked(locked_bytes, may_lock, "mlx5_0").severity is expected


@pytest.mark.parametrize(("scope", "told"), [(2, "sysctl"), (1, ""), (None, "")])
def test_who_may_not_read_others_is_told_whether_yama_is_why(scope: int | None, told: str) -> None:
    found = reading_finding(REFUSED, ptrace_scope=scope, may_trace=False)

    assert found.severity is WARNING
    assert found.command.startswith(told)
    assert ("SYS_PTRACE" in found.fix) == (not told)


def test_nixl_that_does_not_load_is_an_error_with_its_reason() -> None:
    found = installed_finding("No module named 'nixl'", NixlList("", {}), "")

    assert (found.name, found.severity) == ("nixl.installed", ERROR)
    assert "No module named 'nixl'" in found.found


def test_nixl_without_ucx_is_an_error() -> None:
    found = installed_finding("", NixlList("1.5.1", {"UCX": (), "POSIX": ("DRAM_SEG",)}), "")

    assert found.severity is ERROR


def read(way: UcxChoice, rate: float | None, wire: str = "", tls: str = "") -> ReadFacts:
    error = "" if rate else "it hung"
    return ReadFacts(way=way, ucx_tls=tls, bytes_per_s=rate, wire=wire, error=error)


FAST = read(UcxChoice.CONFIGURED, 9e9, "cma/memory")
TCP = read(UcxChoice.TCP, 1.3e9, "tcp/lo", "tcp")


def test_without_rdma_other_machines_are_reached_by_tcp_only() -> None:
    found = list(read_findings([FAST, TCP]))

    assert severities(found) == {
        "nixl.read.configured": OK,
        "nixl.read.tcp": OK,
        "nixl.one_machine": OK,
        "nixl.two_machines": NOTE,
    }
    assert "cma/memory, 9 GB/s" in one_of(found, "nixl.one_machine").found
    assert "TCP only: 1.3 GB/s" in one_of(found, "nixl.two_machines").found


def test_with_rdma_that_is_the_way_to_other_machines() -> None:
    found = read_findings([FAST, TCP, read(UcxChoice.RDMA, 40e9, "rc_mlx5/mlx5_0:1", "ib")])

    assert severities(found)["nixl.two_machines"] is OK


@pytest.mark.parametrize("wire", ["tcp/lo", "52% on tcp/eth0 and 48% on tcp/lo"])
def test_agents_of_one_machine_that_read_over_tcp_are_a_limit(wire: str) -> None:
    found = list(read_findings([read(UcxChoice.CONFIGURED, 1.3e9, wire, "tcp"), TCP]))

    assert severities(found)["nixl.one_machine"] is WARNING
    assert one_of(found, "nixl.one_machine").command == "unset UCX_TLS"


@pytest.mark.parametrize(
    ("way", "expected"),
    [(UcxChoice.CONFIGURED, ERROR), (UcxChoice.TCP, WARNING), (UcxChoice.RDMA, WARNING)],
)
def test_a_way_that_fails_is_fatal_only_if_agents_are_told_to_go_it(
    way: UcxChoice, expected: Severity
) -> None:
    others = [one for one in (FAST, TCP) if one.way is not way]

    found = list(read_findings([*others, read(way, None)]))

    assert one_of(found, f"nixl.read.{way}").severity is expected
    assert "it hung" in one_of(found, f"nixl.read.{way}").found


def test_without_tcp_and_rdma_other_machines_are_out_of_reach() -> None:
    found = read_findings([FAST, read(UcxChoice.TCP, None)])

    assert severities(found)["nixl.two_machines"] is WARNING


def test_without_any_read_nothing_is_summed_up() -> None:
    assert set(severities(read_findings([read(UcxChoice.CONFIGURED, None)]))) == {
        "nixl.read.configured"
    }


def test_without_a_gpu_there_is_a_note() -> None:
    found = no_gpu_finding("2.13.0")

    assert found.severity is NOTE
    assert "CUDA was not checked" in found.found


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (gpus(GpuList("", ()), "torch is built without CUDA"), "cuda.gpus"),
        (ipc_finding("invalid device context"), "cuda.ipc"),
        (allocator_finding("a:1, expandable_segments: True"), "cuda.allocator"),
    ],
)
def test_a_gpu_that_cannot_be_shared_is_a_limit(found: Finding, name: str) -> None:
    assert (found.name, found.severity) == (name, WARNING)


def agent(name: str = "one", port: int = 7701, **changes: Any) -> AgentFacts:
    bind = Bind(
        key="peer_bind",
        address=f"tcp://127.0.0.1:{port}",
        error=changes.pop("error", ""),
        held_by=changes.pop("held_by", ""),
    )
    made = AgentFacts(
        source="one.toml",
        agent_id=name,
        binds=(bind,),
        folder=f"/run/kvbus/{name}-{port}",
        folder_error="",
        staging_bytes=128 * MIB,
        interfaces=("lo",),
        interfaces_error="",
    )
    return replace(made, **changes)


def test_a_port_that_is_taken_is_an_error_that_says_by_whom() -> None:
    found = list(check_one_agent(agent(error="Address already in use", held_by="other")))

    taken = one_of(found, "agents.one.peer_bind")
    assert taken.severity is ERROR
    assert "by the agent 'other'" in taken.found
    assert taken.command == "ss -ltnp 'sport = :7701'"


def test_ports_that_the_very_agent_has_are_none() -> None:
    running = agent(error="Address already in use", held_by="one", staging_bytes=2 * GIB)

    found = check_one_agent(running)

    assert severities(found) == {
        "agents.one.ports": NOTE,
        "agents.one.runtime_dir": OK,
        "agents.one.interfaces": OK,
        "agents.one.keys": OK,
        "agents.staging": OK,
    }


@pytest.mark.parametrize(
    ("fenced", "severity", "said"),
    [
        (True, OK, "kept from other users"),
        (False, WARNING, "open to other users"),
        (None, WARNING, "not looked at"),
    ],
)
def test_ucx_on_loopback_is_looked_at_with_the_rule_that_closes_it(fenced, severity, said) -> None:
    facts = agent(on_loopback=True, data_ports="40000-40031", uid=1001, fenced=fenced)

    found = one_of(list(check_one_agent(facts)), "agents.one.loopback")

    assert found.severity is severity
    assert found.found == f"ports 40000-40031 of UCX on loopback: {said}"
    rule = (
        "iptables -A OUTPUT -o lo -p tcp --dport 40000:40031 -m owner ! --uid-owner 1001 -j REJECT"
    )
    assert found.command == ("" if fenced else rule)


def test_an_agent_whose_data_plane_nobody_fenced_is_an_error() -> None:
    found = check_one_agent(agent(interfaces=(), interfaces_error="'data_interfaces': needed"))

    fence = one_of(list(found), "agents.one.interfaces")
    assert (fence.severity, fence.found) == (ERROR, "'data_interfaces': needed")


@pytest.mark.parametrize(
    ("down", "severity"), [((), OK), (("eth1",), WARNING), (("eth0", "eth1"), ERROR)]
)
def test_interfaces_without_a_link_are_named(down: tuple[str, ...], severity: Severity) -> None:
    found = list(check_one_agent(agent(interfaces=("eth0", "eth1"), down=down)))

    fence = one_of(found, "agents.one.interfaces")
    assert fence.severity is severity
    assert fence.found.endswith(f"without a link now: {', '.join(down)}" if down else "eth0, eth1")


@pytest.mark.parametrize(
    ("role", "trusted", "said"),
    [
        ("prefill", {"decode"}, ""),
        ("prefill", {"prefill", "observer"}, "as decode"),
        ("decode", {"decode"}, "as prefill"),
        ("", {"decode"}, ""),
        ("", {"router"}, "as decode or prefill"),
    ],
)
def test_an_agent_that_trusts_none_of_the_other_role_is_warned(
    role: str, trusted: set[str], said: str
) -> None:
    found = keys_finding(
        "one", "one.toml", key="k", trusted=frozenset(trusted), role=role, error=""
    )

    assert found.severity is (WARNING if said else OK)
    assert found.found.endswith(said)


def test_an_agent_whose_keys_are_wrong_is_an_error() -> None:
    found = list(check_one_agent(agent(keys_error="'key_file': needed")))

    keys = one_of(found, "agents.one.keys")
    assert (keys.severity, keys.found) == (ERROR, "'key_file': needed")


def test_agents_cannot_have_one_address_or_one_name_or_one_folder() -> None:
    same_port = agent_findings([agent("one"), agent("two")], available_bytes=GIB)
    same_name = agent_findings([agent("one"), agent("one", port=7702)], available_bytes=GIB)
    same_folder = agent_findings(
        [agent("one", folder="/run/a"), agent("two", port=7702, folder="/run/a")],
        available_bytes=GIB,
    )
    any_port = agent_findings([agent("one", 0), agent("two", 0)], available_bytes=GIB)

    assert one_of(same_port, "agents.clash").values == {"wanted_twice": ["127.0.0.1:7701"]}
    assert one_of(same_name, "agents.clash").values == {"wanted_twice": ["one"]}
    assert one_of(same_folder, "agents.clash").values == {"wanted_twice": ["/run/a"]}
    assert "agents.clash" not in severities(any_port)


def test_staging_of_all_must_fit() -> None:
    agents = [agent("one"), agent("two", port=7702)]

    enough = agent_findings(agents, available_bytes=256 * MIB)
    less = agent_findings(agents, available_bytes=256 * MIB - 1)

    assert severities(enough)["agents.staging"] is OK
    assert severities(less)["agents.staging"] is ERROR


def test_a_folder_that_cannot_be_is_an_error() -> None:
    found = check_one_agent(agent(folder_error="the path is too long"))

    assert severities(found)["agents.one.runtime_dir"] is ERROR
