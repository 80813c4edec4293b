"""``kvbus events``: lines of JSON of what an agent does, what was missed, and how it ends."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.engine import PrefillSession
from kvbus.events_command import _Asker, _Stream
from kvbus.keys import Role
from kvbus.spawn import Child, free_port
from tests.agents import AgentProcess, Agents, agents_ended, until, wait_until
from tests.engines import engine
from tests.keyring import KeyRing

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def agents() -> Iterator[Agents]:
    with agents_ended(Agents) as agents:
        yield agents
        agents.check()


@pytest.fixture
def prefill(agents: Agents) -> AgentProcess:
    agent: AgentProcess = agents.prepare("prefill")
    agents.start(agent)
    return agent


class Listener:
    """A `kvbus events` that runs, and its lines."""

    def __init__(self, child: Child, lines: Path) -> None:
        self.child, self._lines = child, lines

    def lines(self) -> list[dict[str, Any]]:
        text = self._lines.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines()]


@contextmanager
def listening(folder: Path, endpoint: str, *options: str) -> Iterator[Listener]:
    """One that has heard the agent already."""
    with running(folder, endpoint, *options) as listener:
        wait_until(lambda: listener.events() == ["boot"], "the agent is heard")
        yield listener


@contextmanager
def running(folder: Path, endpoint: str, *options: str) -> Iterator[Listener]:
    command = [*KVBUS, "events", endpoint, *options]
    lines = folder / "lines"
    with (
        lines.open("wb") as stdout,
        Child.start("kvbus events", command, log=folder / "log", stdout=stdout) as child,
    ):
        yield Listener(child, lines)


async def one_offer(agent: AgentProcess, request: str) -> str:
    async with engine(PrefillSession, agent.attach) as source:
        blocks = source.some_blocks(1, 32)
        offer = await source.prefill.offer(request, num_tokens=32, block_ids=blocks)
        await offer.withdraw()
        await offer.released()
        return str(offer.ticket["offer_id"])


async def test_each_event_is_a_line_with_its_agent_boot_and_number(prefill, tmp_path) -> None:
    with listening(tmp_path, prefill.peer) as listener:
        offer_id = await one_offer(prefill, "r")
        await until(lambda: "engine.lost" in listener.events())

        opened = next(line for line in listener.lines() if line["event"] == "offer.opened")

    assert set(listener.events()) >= {"boot", "engine.ready", "offer.opened", "offer.released"}
    assert opened["agent"] == prefill.settings["agent_id"]
    assert opened["seq"] == 1
    assert opened["offer_id"] == offer_id
    assert opened["boot"] == listener.lines()[0]["boot"]


async def test_what_is_not_wanted_is_left_out_and_the_count_ends_it(prefill, tmp_path) -> None:
    wanted = ("--only", "offer.*", "--count", "2")
    with listening(tmp_path, prefill.peer, *wanted) as listener:
        await one_offer(prefill, "r")

        assert await listener.child.ended() == 0

    assert listener.events() == ["boot", "offer.opened", "offer.released"]


async def test_the_events_of_one_offer(prefill, tmp_path) -> None:
    async with engine(PrefillSession, prefill.attach) as source:
        first, second = [
            await source.prefill.offer(f"r{n}", num_tokens=32, block_ids=source.some_blocks(n, 32))
            for n in (1, 2)
        ]
        with listening(tmp_path, prefill.peer, "--request", second.ticket["offer_id"]) as listener:
            for offer in (first, second):
                await offer.withdraw()
                await offer.released()
            await until(lambda: "offer.released" in listener.events())

            released = [line for line in listener.lines() if line["event"] == "offer.released"]

    assert [line["offer_id"] for line in released] == [second.ticket["offer_id"]]


async def test_ctrl_c_is_the_usual_end(prefill, tmp_path) -> None:
    with listening(tmp_path, prefill.peer) as listener:
        listener.child.process.send_signal(signal.SIGINT)

        assert await listener.child.ended() == 0

    assert listener.child.log_text() == ""


async def test_a_reader_that_has_enough_ends_it_quietly(prefill, tmp_path) -> None:
    command = [*KVBUS, "events", prefill.peer]
    log = tmp_path / "log"
    with Child.start("kvbus events", command, log=log, stdout=subprocess.PIPE) as child:
        assert child.process.stdout is not None
        assert b'"boot"' in child.process.stdout.readline()
        child.process.stdout.close()
        await one_offer(prefill, "r")

        assert await child.ended() == 0

    assert child.log_text() == ""


async def test_an_agent_that_comes_back_is_heard_again(agents, prefill, tmp_path) -> None:
    with listening(tmp_path, prefill.peer) as listener:
        prefill.kill()
        prefill.start()
        await until(lambda: listener.events().count("boot") == 2)
        await one_offer(prefill, "r")
        await until(lambda: "offer.opened" in listener.events())

        boots = [line["boot"] for line in listener.lines() if line["event"] == "boot"]

    assert boots[0] != boots[1]


async def test_an_agent_that_stays_away_is_said_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr("kvbus.events_command.ANSWER_S", 0.05)
    monkeypatch.setattr("kvbus.events_command.RETRY_S", 0.01)
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    with anyio.move_on_after(1.0):
        await _Asker(endpoint, curve=None).ask()

    assert capsys.readouterr().err.count(f"no answer from {endpoint}") == 1


async def test_an_agent_that_is_away_is_waited_for(agents, tmp_path) -> None:
    agent = agents.prepare("prefill")
    with running(tmp_path, agent.settings["peer_bind"], "--only", "engine.*") as listener:
        await until(lambda: "no answer from" in listener.child.log_text())
        agents.start(agent)
        await until(lambda: listener.events() == ["boot"])


def test_a_key_that_may_not_ask_is_refused(agents, tmp_path) -> None:
    ring = KeyRing(tmp_path)
    agent = ring.prepare(agents, Role.PREFILL, "prefill")
    ring.pair("stranger")
    agents.start(agent)
    keys = f"--server-key={ring.pair('prefill').public}"
    observer, stranger = str(ring.secret_path("observer")), str(ring.secret_path("stranger"))

    refused = CliRunner().invoke(app, ["events", agent.peer, keys, "--key-file", stranger])
    with listening(tmp_path, agent.peer, keys, "--key-file", observer) as listener:
        heard = listener.events()

    assert refused.exit_code == 1
    assert "refused our key" in refused.stderr
    assert heard == ["boot"]


def test_a_key_that_may_not_hear_events_is_told_so_and_the_agent_turns_nobody_away(
    agents, tmp_path
) -> None:
    ring = KeyRing(tmp_path)
    agent = ring.prepare(agents, Role.DECODE, "decode")
    ring.trust("prefill", Role.PREFILL)
    agents.start(agent)
    own = f"--key-file={ring.secret_path('prefill')}"
    server = f"--server-key={ring.pair('decode').public}"

    told = subprocess.run(
        [*KVBUS, "events", agent.peer, own, server],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (told.returncode, told.stdout) == (1, "")
    assert len(told.stderr.splitlines()) == 1
    assert "trusted there as prefill, which hears no events" in told.stderr
    assert not agent.metric("refused_keys")


async def test_what_was_missed_is_a_line(capsys) -> None:
    _Stream("prefill-0", "", -1).on_gap("tcp://h:1", "boot-1", "offer.opened")

    line = json.loads(capsys.readouterr().out)

    assert line["event"] == "gap"
    assert (line["agent"], line["boot"], line["topic"]) == ("prefill-0", "boot-1", "offer.opened")


def test_an_event_that_there_is_not_is_a_mistake() -> None:
    result = CliRunner().invoke(app, ["events", "tcp://127.0.0.1:1", "--only", "ofer.*"])

    assert result.exit_code == 2
    assert "ofer" in result.stderr
