"""``kvbus events``: lines of JSON of what an agent does, what was missed, and how it ends."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest
import zmq
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.engine import PrefillSession
from kvbus.keys import Role
from kvbus.spawn import Child, free_port
from tests.agents import AgentProcess, Agents, until, wait_until
from tests.doctor.played_agents import BOOT, told_by
from tests.doctor.played_agents import agent as played_agent
from tests.engines import engine
from tests.keyring import KeyRing

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def prefill(fresh: Agents) -> AgentProcess:
    agent: AgentProcess = fresh.prepare("prefill")
    fresh.start(agent)
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


async def test_each_event_is_a_line_with_its_agent_boot_and_number_until_ctrl_c(
    prefill: AgentProcess, tmp_path: Path
) -> None:
    with listening(tmp_path, prefill.peer) as listener:
        offer_id = await one_offer(prefill, "r")
        await until(lambda: "engine.lost" in listener.events())
        listener.child.process.send_signal(signal.SIGINT)
        status = await listener.child.ended()

    opened = next(line for line in listener.lines() if line["event"] == "offer.opened")
    assert set(listener.events()) >= {"boot", "engine.ready", "offer.opened", "offer.released"}
    assert opened["agent"] == prefill.settings["agent_id"]
    assert opened["seq"] == 1
    assert opened["offer_id"] == offer_id
    assert opened["boot"] == listener.lines()[0]["boot"]
    assert (status, listener.child.log_text()) == (0, "")


async def test_what_is_not_wanted_is_left_out_and_the_count_ends_it(
    prefill: AgentProcess, tmp_path: Path
) -> None:
    wanted = ("--only", "offer.*", "--count", "2")
    with listening(tmp_path, prefill.peer, *wanted) as listener:
        await one_offer(prefill, "r")

        assert await listener.child.ended() == 0

    assert listener.events() == ["boot", "offer.opened", "offer.released"]


async def test_the_events_of_one_offer(prefill: AgentProcess, tmp_path: Path) -> None:
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


async def test_a_reader_that_has_enough_ends_it_quietly(
    prefill: AgentProcess, tmp_path: Path
) -> None:
    command = [*KVBUS, "events", prefill.peer]
    log = tmp_path / "log"
    with Child.start("kvbus events", command, log=log, stdout=subprocess.PIPE) as child:
        assert child.process.stdout is not None
        assert b'"boot"' in child.process.stdout.readline()
        child.process.stdout.close()
        await one_offer(prefill, "r")

        assert await child.ended() == 0

    assert child.log_text() == ""


async def test_an_agent_that_is_away_is_waited_for_which_is_said_once(
    fresh: Agents, tmp_path: Path
) -> None:
    agent = fresh.prepare("prefill")
    with running(tmp_path, agent.settings["peer_bind"]) as listener:
        await until(lambda: "no answer from" in listener.child.log_text())
        fresh.start(agent)
        await until(lambda: listener.events() == ["boot"])
        num_said = listener.child.log_text().count("no answer from")
        agent.kill()
        agent.start()
        await until(lambda: listener.events().count("boot") == 2)
        await one_offer(agent, "r")
        await until(lambda: "offer.opened" in listener.events())

    first, second = [line["boot"] for line in listener.lines() if line["event"] == "boot"]
    assert first != second
    assert num_said == 1


def test_a_key_that_may_not_ask_or_hear_is_told_so_and_the_agent_turns_nobody_away(
    fresh: Agents, tmp_path: Path
) -> None:
    ring = KeyRing(tmp_path)
    agent = ring.prepare(fresh, Role.DECODE, "decode")
    ring.trust("prefill", Role.PREFILL)
    ring.pair("stranger")
    fresh.start(agent)
    server = f"--server-key={ring.pair('decode').public}"

    def asked(name: str) -> tuple[str, ...]:
        return agent.peer, server, f"--key-file={ring.secret_path(name)}"

    deaf = CliRunner().invoke(app, ["events", *asked("prefill")])
    turned_away = agent.metric("refused_keys")
    stranger = CliRunner().invoke(app, ["events", *asked("stranger")])
    with listening(tmp_path, *asked("observer")) as listener:
        heard = listener.events()

    assert (deaf.exit_code, deaf.stdout, len(deaf.stderr.splitlines())) == (1, "", 1)
    assert "trusted there as prefill, which hears no events" in deaf.stderr
    assert not turned_away
    assert stranger.exit_code == 1
    assert "refused our key" in stranger.stderr
    assert heard == ["boot"]


async def test_what_was_missed_is_a_line(tmp_path: Path) -> None:
    """A played agent, of whose events every second one is lost."""
    at = f"tcp://127.0.0.1:{free_port()}"
    status = told_by("prefill", events_endpoint=at, peer_endpoint=at)
    with (
        zmq.Context() as context,
        context.socket(zmq.PUB) as events,
        played_agent(status) as endpoint,
    ):
        events.set(zmq.LINGER, 0)
        events.bind(at)
        with running(tmp_path, endpoint) as listener:
            for seq in count(1, step=2):
                body = {"engine_id": "e", "reason": "it ended"}
                event = {"v": 1, "op": "engine.lost", "seq": seq, "boot": BOOT, "body": body}
                events.send_multipart([b"engine.lost", msgpack.packb(event)])
                await anyio.sleep(0.01)
                if "gap" in listener.events():
                    break

    gap = next(line for line in listener.lines() if line["event"] == "gap")
    assert (gap["agent"], gap["boot"], gap["topic"]) == ("prefill-0", BOOT, "engine.lost")


def test_an_event_that_there_is_not_is_a_mistake() -> None:
    result = CliRunner().invoke(app, ["events", "tcp://127.0.0.1:1", "--only", "ofer.*"])

    assert result.exit_code == 2
    assert "ofer" in result.stderr
