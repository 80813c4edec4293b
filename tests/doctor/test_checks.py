"""What is said of machines: the check of each family on good ones, bad ones and drawn ones."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.doctor.check.agents import AgentFacts, Bind, check_agents
from kvbus.doctor.check.cuda import check_cuda
from kvbus.doctor.check.host import check_limits, check_memory, check_processes
from kvbus.doctor.check.nixl import ReadFacts, UcxChoice, check_nixl, check_reads
from kvbus.doctor.check.versions import check_versions
from kvbus.doctor.finding import Finding, Severity
from tests.doctor import drawn

MIB, GIB = 1 << 20, 1 << 30
OK, NOTE, WARNING, ERROR = Severity
REFUSED = "Operation not permitted"


def check_one_agent(agent: AgentFacts) -> Iterable[Finding]:
    return check_agents([agent], available_bytes=GIB)


CHECKS: list[tuple[Callable[[Any], Iterable[Finding]], st.SearchStrategy[Any]]] = [
    (check_versions, drawn.version_facts),
    (check_memory, drawn.memories),
    (check_limits, drawn.limits),
    (check_processes, drawn.processes),
    (check_nixl, drawn.nixls),
    (check_reads, drawn.reads),
    (check_cuda, drawn.cudas),
    (check_one_agent, drawn.agents),
]


@pytest.mark.parametrize(("check", "facts"), CHECKS)
@given(data=st.data())
def test_whatever_the_machine_complaints_have_a_fix_and_names_are_unique(
    check: Callable[[Any], Iterable[Finding]], facts: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    found = list(check(data.draw(facts)))

    assert all(one.found for one in found)
    assert all(one.why and one.fix for one in found if one.is_complaint)
    assert not any(one.fix or one.command for one in found if one.severity is OK)
    assert len({one.name for one in found}) == len(found)
    assert json.loads(json.dumps([dict(one.values) for one in found])) if found else True


def severities(found: Iterable[Finding]) -> dict[str, Severity]:
    return {one.name: one.severity for one in found}


def one_of(found: Iterable[Finding], name: str) -> Finding:
    return next(one for one in found if one.name == name)


@pytest.mark.parametrize(
    "found",
    [
        check_versions(drawn.GOOD_VERSIONS),
        check_memory(drawn.GOOD_MEMORY),
        check_limits(drawn.GOOD_LIMITS),
        check_processes(drawn.GOOD_PROCESSES),
        check_nixl(drawn.GOOD_NIXL),
        check_cuda(drawn.GOOD_CUDA),
    ],
)
def test_a_good_machine_is_all_right(found: Iterable[Finding]) -> None:
    assert set(severities(found).values()) == {OK}


def test_a_package_that_is_too_new_or_missing_is_an_error_with_its_command() -> None:
    facts = replace(drawn.GOOD_VERSIONS, installed={"nixl": "2.0.0"})

    found = list(check_versions(facts))

    assert severities(found) == {
        "versions.python": OK,
        "versions.nixl": ERROR,
        "versions.torch": ERROR,
        "versions.packages": OK,
    }
    assert one_of(found, "versions.nixl").command == "pip install 'nixl<2,>=1.5.1'"
    assert "torch is not installed" in one_of(found, "versions.torch").found


@pytest.mark.parametrize("torch", ["2.7.0a0+7c8ec84dab.nv25.03", "2.13.0+cpu"])
def test_builds_of_a_vendor_are_what_is_required(torch: str) -> None:
    facts = replace(drawn.GOOD_VERSIONS, installed={"nixl": "1.5.1", "torch": torch})

    assert set(severities(check_versions(facts)).values()) == {OK}


def test_an_old_python_is_an_error() -> None:
    found = check_versions(replace(drawn.GOOD_VERSIONS, python="3.10.9"))

    assert severities(found)["versions.python"] is ERROR


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"available_bytes": 2 * GIB}, "memory.room", OK),
        ({"available_bytes": 2 * GIB - 1}, "memory.room", WARNING),
        ({"folder_free_bytes": 64 * MIB}, "memory.shared_folder", NOTE),
        ({"folder_bytes": None, "folder_free_bytes": None}, "memory.shared_folder", NOTE),
        ({"segment_error": REFUSED}, "memory.segment", ERROR),
        ({"shmem_huge": "never"}, "memory.huge_pages", NOTE),
        ({"shmem_huge": "never", "num_free_huge_pages": 1}, "memory.huge_pages", OK),
        ({"num_cores": 1}, "memory.cores", WARNING),
        ({"cpu_quota": 1.5}, "memory.cores", WARNING),
        ({"cpu_quota": 2.0}, "memory.cores", OK),
    ],
)
def test_memory_is_complained_of_by_what_it_costs(
    change: dict[str, Any], name: str, expected: Severity
) -> None:
    found = check_memory(replace(drawn.GOOD_MEMORY, **change))

    assert severities(found)[name] is expected


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"open_files": 4096}, "limits.open_files", OK),
        ({"open_files": 1024}, "limits.open_files", NOTE),
        ({"open_files": 1023}, "limits.open_files", WARNING),
        ({"open_files": 63}, "limits.open_files", ERROR),
        ({"open_files": None}, "limits.open_files", OK),
        ({"locked_bytes": 8 * MIB}, "limits.locked_memory", OK),
        ({"file_bytes": GIB}, "limits.file_size", WARNING),
    ],
)
def test_limits_are_complained_of_by_what_they_allow(
    change: dict[str, Any], name: str, expected: Severity
) -> None:
    found = check_limits(replace(drawn.GOOD_LIMITS, **change))

    assert severities(found)[name] is expected


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
    facts = replace(
        drawn.GOOD_LIMITS, locked_bytes=locked_bytes, may_lock=may_lock, rdma_devices=("mlx5_0",)
    )

    assert severities(check_limits(facts))["limits.locked_memory"] is expected


@pytest.mark.parametrize(("scope", "told"), [(2, "sysctl"), (1, ""), (None, "")])
def test_who_may_not_read_others_is_told_whether_yama_is_why(scope: int | None, told: str) -> None:
    facts = replace(drawn.GOOD_PROCESSES, error=REFUSED, ptrace_scope=scope)

    (found,) = check_processes(facts)

    assert found.severity is WARNING
    assert found.command.startswith(told)
    assert ("SYS_PTRACE" in found.fix) == (not told)


def test_nixl_that_does_not_load_is_an_error_with_its_reason() -> None:
    found = list(check_nixl(replace(drawn.GOOD_NIXL, error="No module named 'nixl'")))

    assert severities(found) == {"nixl.installed": ERROR}
    assert "No module named 'nixl'" in found[0].found


def test_nixl_without_ucx_is_an_error() -> None:
    found = check_nixl(replace(drawn.GOOD_NIXL, backends={"UCX": (), "POSIX": ("DRAM_SEG",)}))

    assert severities(found)["nixl.installed"] is ERROR


def read(way: UcxChoice, rate: float | None, wire: str = "", tls: str = "") -> ReadFacts:
    error = "" if rate else "it hung"
    return ReadFacts(way=way, ucx_tls=tls, bytes_per_s=rate, wire=wire, error=error)


FAST = read(UcxChoice.CONFIGURED, 9e9, "cma/memory")
TCP = read(UcxChoice.TCP, 1.3e9, "tcp/lo", "tcp")


def test_without_rdma_other_machines_are_reached_by_tcp_only() -> None:
    found = list(check_reads([FAST, TCP]))

    assert severities(found) == {
        "nixl.read.configured": OK,
        "nixl.read.tcp": OK,
        "nixl.one_machine": OK,
        "nixl.two_machines": NOTE,
    }
    assert "cma/memory, 9 GB/s" in one_of(found, "nixl.one_machine").found
    assert "TCP only: 1.3 GB/s" in one_of(found, "nixl.two_machines").found


def test_with_rdma_that_is_the_way_to_other_machines() -> None:
    found = check_reads([FAST, TCP, read(UcxChoice.RDMA, 40e9, "rc_mlx5/mlx5_0:1", "ib")])

    assert severities(found)["nixl.two_machines"] is OK


@pytest.mark.parametrize("wire", ["tcp/lo", "52% on tcp/eth0 and 48% on tcp/lo"])
def test_agents_of_one_machine_that_read_over_tcp_are_a_limit(wire: str) -> None:
    found = list(check_reads([read(UcxChoice.CONFIGURED, 1.3e9, wire, "tcp"), TCP]))

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

    found = list(check_reads([*others, read(way, None)]))

    assert one_of(found, f"nixl.read.{way}").severity is expected
    assert "it hung" in one_of(found, f"nixl.read.{way}").found


def test_without_tcp_and_rdma_other_machines_are_out_of_reach() -> None:
    found = check_reads([FAST, read(UcxChoice.TCP, None)])

    assert severities(found)["nixl.two_machines"] is WARNING


def test_without_any_read_nothing_is_summed_up() -> None:
    assert set(severities(check_reads([read(UcxChoice.CONFIGURED, None)]))) == {
        "nixl.read.configured"
    }


def test_without_a_gpu_there_is_one_note() -> None:
    (found,) = check_cuda(replace(drawn.GOOD_CUDA, num_devices=0, gpus=()))

    assert found.severity is NOTE
    assert "CUDA was not checked" in found.found


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"gpus": (), "survey_error": "torch is built without CUDA"}, "cuda.gpus"),
        ({"ipc_error": "invalid device context"}, "cuda.ipc"),
        ({"allocator": "a:1, expandable_segments: True"}, "cuda.allocator"),
    ],
)
def test_a_gpu_that_cannot_be_shared_is_a_limit(change: dict[str, Any], name: str) -> None:
    found = check_cuda(replace(drawn.GOOD_CUDA, **change))

    assert severities(found)[name] is WARNING


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
        "agents.staging": OK,
    }


def test_agents_cannot_have_one_address_or_one_name_or_one_folder() -> None:
    same_port = check_agents([agent("one"), agent("two")], available_bytes=GIB)
    same_name = check_agents([agent("one"), agent("one", port=7702)], available_bytes=GIB)
    same_folder = check_agents(
        [agent("one", folder="/run/a"), agent("two", port=7702, folder="/run/a")],
        available_bytes=GIB,
    )
    any_port = check_agents([agent("one", 0), agent("two", 0)], available_bytes=GIB)

    assert one_of(same_port, "agents.clash").values == {"wanted_twice": ["127.0.0.1:7701"]}
    assert one_of(same_name, "agents.clash").values == {"wanted_twice": ["one"]}
    assert one_of(same_folder, "agents.clash").values == {"wanted_twice": ["/run/a"]}
    assert "agents.clash" not in severities(any_port)


def test_staging_of_all_must_fit() -> None:
    agents = [agent("one"), agent("two", port=7702)]

    enough = check_agents(agents, available_bytes=256 * MIB)
    less = check_agents(agents, available_bytes=256 * MIB - 1)

    assert severities(enough)["agents.staging"] is OK
    assert severities(less)["agents.staging"] is ERROR


def test_a_folder_that_cannot_be_is_an_error() -> None:
    found = check_one_agent(agent(folder_error="the path is too long"))

    assert severities(found)["agents.one.runtime_dir"] is ERROR
