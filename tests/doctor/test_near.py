"""What the doctor says of a prefill agent of this machine, by what both say of themselves."""

import socket
from pathlib import Path

import msgspec
import pytest

from kvbus.agent.process.machine import mount_namespace
from kvbus.doctor.finding import OK, WARNING
from kvbus.doctor.near import near_findings
from kvbus.protocol import Sharing

HERE = Sharing(machine="m", uid=7, mount_namespace=mount_namespace(), pid_namespace="pid:[1]")


def theirs(**changes: object) -> Sharing:
    """A prefill agent of this machine, in another PID namespace, that lends nothing here."""
    return msgspec.structs.replace(
        HERE, **{"pid_namespace": "pid:[2]", "path": "/nowhere/memory.sock", **changes}
    )


@pytest.mark.parametrize("machine", ["another", ""])
def test_nothing_is_said_of_another_machine(machine: str) -> None:
    ours = msgspec.structs.replace(HERE, machine=machine) if not machine else HERE

    assert list(near_findings("tcp://h:1", theirs(machine=machine), ours)) == []


@pytest.mark.parametrize(
    ("changes", "severity", "said"),
    [
        ({}, WARNING, "over TCP: /nowhere/memory.sock is not here"),
        ({"uid": 8}, WARNING, "over TCP: it is of uid 8, and the reader of uid 7"),
        ({"closed": "mapped = false"}, WARNING, "over TCP: mapped = false"),
        ({"pid_namespace": "pid:[1]"}, OK, "through shared memory: /nowhere"),
        ({"pid_namespace": ""}, OK, "through shared memory: /nowhere"),
    ],
)
def test_an_agent_that_is_not_mapped_is_read_over_tcp_from_another_namespace(
    changes: dict[str, object], severity: object, said: str
) -> None:
    (found,) = near_findings("tcp://h:1", theirs(**changes), HERE)

    assert found.severity is severity
    assert said in found.found


def test_a_socket_that_is_here_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "memory.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))

        (found,) = near_findings("tcp://h:1", theirs(path=str(path)), HERE)

    assert found.severity is OK
    assert "can be mapped" in found.found


@pytest.mark.parametrize(
    ("states", "said"),
    [(["open", "open"], "can be mapped"), (["open", "no room"], "through shared memory: no room")],
)
def test_what_a_reader_has_met_counts_before_what_is_thought(states: list[str], said: str) -> None:
    met = dict(zip(("one", "two"), states, strict=True))
    (found,) = near_findings("tcp://h:1", theirs(pid_namespace="pid:[1]"), HERE, met=met)

    assert said in found.found


@pytest.mark.parametrize(
    ("namespace", "said"), [("mnt:[8]", "can be mapped"), ("mnt:[9]", "may not be there")]
)
def test_a_reader_in_a_mount_namespace_of_its_own_is_not_looked_into(
    namespace: str, said: str
) -> None:
    reader = msgspec.structs.replace(HERE, mount_namespace="mnt:[8]")
    prefill = theirs(mount_namespace=namespace, pid_namespace="pid:[1]")
    (found,) = near_findings("tcp://h:1", prefill, reader)

    assert said in found.found
