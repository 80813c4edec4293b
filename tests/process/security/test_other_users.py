"""Another user of the machine gets no agent or engine memory, and is not told where agents run."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import Link
from kvbus.errors import ConfigError
from tests.support.agents import Agents
from tests.support.engines import make_spec
from tests.support.plain_sockets import ask

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user"),
]
NOBODY = 65534


@contextmanager
def as_another() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def of_anybody(folder: Path) -> Path:
    folder.chmod(0o1777)
    return folder


async def test_engine_passes_no_memory_to_impostor_of_agent(of_anybody: Path) -> None:
    attach = of_anybody / "kvbus-0" / "attach.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        with as_another():
            attach.parent.mkdir(mode=0o777)
            listener.bind(str(attach))
            listener.listen()
        attach.chmod(0o777)
        with pytest.raises(ConfigError, match=f"has uid {NOBODY}"):
            await Link(attach, make_spec()).__aenter__()
        accepted, _ = listener.accept()
        with accepted:
            assert socket.recv_fds(accepted, 1 << 16, 64)[:2] == (b"", [])


def test_agent_refuses_default_folder_made_by_another_user(fresh: Agents, of_anybody: Path) -> None:
    default = of_anybody / f"kvbus-{os.getuid()}"
    with as_another():
        default.mkdir(mode=0o777)
    agent = fresh.prepare("prefill", runtime_dir="", env={"XDG_RUNTIME_DIR": str(of_anybody)})
    agent.expected_trouble.add("not json")
    agent.launch()
    status, said = agent.exit_status(), " ".join(agent.lines())
    assert status == 1
    assert f"{default.name} belongs to uid {NOBODY}" in said
    assert "remove it, or set runtime_dir" in said


def test_another_user_is_not_told_where_the_agent_runs(fresh: Agents) -> None:
    agent = fresh.prepare("prefill", mapped=False)
    fresh.start(agent)
    to_its_user = agent.status()
    with as_another():
        to_another = ask(agent.peer, "status", {})["ok"]
    assert to_its_user["sharing"]["mount_namespace"]
    assert to_its_user["data_endpoints"]
    hidden: dict[str, Any] = {"sharing": None, "data_endpoints": []}
    assert {name: to_another[name] for name in hidden} == hidden
    assert to_another["counts"] == to_its_user["counts"]
