"""Another user of the machine, who was there first, gets neither agent nor engine memory."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import Link
from kvbus.errors import ConfigError
from tests.agents import WITHIN_S, AgentProcess, Agents
from tests.engines import make_spec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user"),
]
SCRIPT = Path(__file__).parent / "processes" / "another_user.py"
ASKS_STATUS = SCRIPT.with_name("asks_status.py")
NOBODY = 65534


@dataclass
class Stranger:
    """The other user's process, and where it listens."""

    process: subprocess.Popen[str]
    attach: Path

    def heard(self) -> str:
        """How many bytes and descriptors it was sent, once who connected has left."""
        return self.process.communicate(timeout=WITHIN_S)[0].strip()


@contextmanager
def stranger_listens(folder: Path) -> Iterator[Stranger]:
    """Another user makes ``folder`` in a sticky one, and listens there as an agent would."""
    command = [sys.executable, str(SCRIPT), str(folder), "attach.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield Stranger(process, folder / "attach.sock")
        finally:
            process.kill()


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """As /tmp: anybody writes, nobody renames what is another's."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


async def test_an_engine_passes_no_memory_to_who_listens_in_the_agents_place(
    shared_folder: Path,
) -> None:
    with stranger_listens(shared_folder / "kvbus-0") as stranger:
        with pytest.raises(ConfigError, match=f"is of uid {NOBODY}"):
            await Link(stranger.attach, make_spec()).__aenter__()
        heard = stranger.heard()

    assert heard == "0 0"


def test_an_agent_does_not_use_a_default_folder_that_another_user_made_first(
    fresh: Agents, shared_folder: Path
) -> None:
    with stranger_listens(shared_folder / f"kvbus-{os.getuid()}"):
        agent = fresh.prepare(
            "prefill", runtime_dir="", env={"XDG_RUNTIME_DIR": str(shared_folder)}
        )
        agent.expected_trouble.add("not json")
        agent.launch()
        status = agent.exit_status()
        said = " ".join(agent.lines())

    assert status == 1
    assert f"kvbus-{os.getuid()} belongs to uid {NOBODY}" in said
    assert "remove it, or set runtime_dir" in said


def status_as(agent: AgentProcess, uid: int) -> dict[str, Any]:
    """What the agent says of itself to a process of that user, which shows no key."""
    command = [sys.executable, str(ASKS_STATUS), agent.settings["peer_bind"], str(uid)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True)
    answer: dict[str, Any] = json.loads(told.stdout)["ok"]
    return answer


def test_another_user_is_not_told_where_the_agent_runs(fresh: Agents) -> None:
    agent = fresh.prepare("prefill", mapped=False)
    fresh.start(agent)

    to_its_user, to_another = status_as(agent, os.getuid()), status_as(agent, NOBODY)

    assert to_its_user["sharing"]["mount_namespace"]
    assert to_its_user["data_endpoints"]
    hidden: dict[str, Any] = {"sharing": None, "data_endpoints": []}
    assert {name: to_another[name] for name in hidden} == hidden
    assert to_another["counts"] == to_its_user["counts"]
