"""``kvbus status`` of a peer address: what an agent holds; with ``--events`` what it does."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgpack
import pytest
import zmq
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.protocol import Role
from kvbus.spawn import Child, free_port
from tests.support.agents import AgentProcess, Agents, until, wait_until, write_config
from tests.support.engines import begin, engine, pair
from tests.support.keyring import KeyRing
from tests.tools.doctor.played_agents import BOOT, told_by
from tests.tools.doctor.played_agents import agent as played_agent

pytestmark = pytest.mark.anyio

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()"]


class Listener(NamedTuple):
    """A `kvbus status --events` that runs, and the file of its lines."""

    child: Child
    file: Path

    def lines(self) -> list[dict[str, Any]]:
        text = self.file.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def events(self, **fields: str) -> list[str]:
        return [line["event"] for line in self.lines() if fields.items() <= line.items()]


@contextmanager
def listening(folder: Path, endpoint: str, *options: str, waits: bool = True) -> Iterator[Listener]:
    """One that has reached the agent already, if it ``waits`` for that."""
    command, log = [*KVBUS, "status", endpoint, "--events", *options], folder / "log"
    with (
        (folder / "lines").open("wb") as stdout,
        Child.start("kvbus status", command, log=log, stdout=stdout) as child,
    ):
        listener = Listener(child, folder / "lines")
        if waits:
            wait_until(lambda: listener.events() == ["boot"], "the agent is reached")
        yield listener


async def one_offer(agent: AgentProcess) -> str:
    """Its id; it is withdrawn."""
    async with engine(agent.attach) as source:
        offer = await source.control.offer("r", num_tokens=16, block_ids={"full": [1]})
        await offer.withdraw()
        await offer.ended
        return offer.offer_id


async def test_each_event_is_line_with_agent_boot_and_seq_until_ctrl_c(
    prefill: AgentProcess, decode: AgentProcess, tmp_path: Path
) -> None:
    with listening(tmp_path, prefill.peer) as listener:
        async with pair(prefill.attach, decode.attach) as engines:
            handoff = await begin(*engines, 16, ready=16)
            await handoff.offer.seal()
            await handoff.completed()
        await until(lambda: "engine.lost" in listener.events())
        listener.child.process.send_signal(signal.SIGINT)
        status = await listener.child.ended()

    boot, *others = listener.lines()
    of_offer = ["offer.opened", "offer.sealed", "lease.granted", "lease.ended", "offer.released"]
    assert listener.events(offer_id=handoff.offer.offer_id) == of_offer
    assert {"boot", "engine.ready", "engine.lost"} <= set(listener.events())
    assert {(one["agent"], one["boot"]) for one in others} == {(boot["agent"], boot["boot"])}
    assert boot["agent"] == prefill.settings["agent_id"]
    assert all(one["seq"] > 0 for one in others)
    assert (status, listener.child.log_text()) == (0, "")


async def test_unwanted_events_are_left_out_and_the_count_ends_it(
    prefill: AgentProcess, tmp_path: Path
) -> None:
    async with engine(prefill.attach) as source:
        block: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}
        first, second = [await source.prefill.offer(name, sealed=False, **block) for name in "rs"]
        wanted = ("--request", second.offer_id, "--only", "offer.released", "--count", "1")
        with listening(tmp_path, prefill.peer, *wanted) as listener:
            await second.seal()
            for offer in (first, second):
                await offer.withdraw()
                await offer.ended

            assert await listener.child.ended() == 0

    assert listener.events() == ["boot", "offer.released"]
    assert listener.events(offer_id=second.offer_id) == ["offer.released"]


async def test_a_pipe_whose_reader_has_gone_ends_it_quietly(
    prefill: AgentProcess, tmp_path: Path
) -> None:
    command, log = [*KVBUS, "status", "--events", prefill.peer], tmp_path / "log"
    with Child.start("kvbus status", command, log=log, stdout=subprocess.PIPE) as child:
        assert child.process.stdout is not None
        assert b'"boot"' in child.process.stdout.readline()
        child.process.stdout.close()
        await one_offer(prefill)

        assert await child.ended() == 0

    assert child.log_text() == ""


async def test_a_missing_agent_is_waited_for_which_is_shown_once(
    fresh: Agents, tmp_path: Path
) -> None:
    agent = fresh.prepare("prefill")
    with listening(tmp_path, agent.settings["peer_bind"], waits=False) as listener:
        await until(lambda: "no answer from" in listener.child.log_text())
        fresh.start(agent)
        await until(lambda: listener.events() == ["boot"])
        num_shown = listener.child.log_text().count("no answer from")
        agent.kill()
        agent.start()
        await until(lambda: listener.events().count("boot") == 2)
        await one_offer(agent)
        await until(lambda: "offer.opened" in listener.events())

    assert len({line["boot"] for line in listener.lines() if line["event"] == "boot"}) == 2
    assert num_shown == 1


def test_key_without_right_is_told_so_and_not_counted_as_refused(
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

    deaf = CliRunner().invoke(app, ["status", "--events", *asked("prefill")])
    turned_away = agent.metric("refused_keys")
    stranger = CliRunner().invoke(app, ["status", "--events", *asked("stranger")])
    with listening(tmp_path, *asked("observer")):
        pass

    assert (deaf.exit_code, deaf.stdout, len(deaf.stderr.splitlines())) == (1, "", 1)
    assert "trusted there as prefill, which receives no events" in deaf.stderr
    assert not turned_away
    assert (stranger.exit_code, "refused our key" in stranger.stderr) == (1, True)


async def test_what_was_missed_is_a_line(tmp_path: Path) -> None:
    """The agent is played and loses every second event; events before the first are no gap."""
    at = f"tcp://127.0.0.1:{free_port()}"
    status = told_by("prefill", events_endpoint=at, peer_endpoint=at)
    with (
        zmq.Context() as context,
        context.socket(zmq.PUB) as events,
        played_agent(status) as endpoint,
    ):
        events.set(zmq.LINGER, 0)
        events.bind(at)
        with listening(tmp_path, endpoint, waits=False) as listener:
            for seq in count(41, step=2):
                body = {"engine_id": "e", "reason": "it ended"}
                event = {"v": 1, "op": "engine.lost", "seq": seq, "boot": BOOT, "body": body}
                events.send_multipart([b"engine.lost", msgpack.packb(event)])
                await anyio.sleep(0.01)
                if "gap" in listener.events():
                    break

    gap = next(line for line in listener.lines() if line["event"] == "gap")
    assert listener.events()[:3] == ["boot", "engine.lost", "gap"]
    assert (gap["agent"], gap["boot"], gap["topic"]) == ("prefill-0", BOOT, "engine.lost")


def status(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["status", *arguments], env={"COLUMNS": "200"})


def test_what_an_agent_holds_is_a_table_or_json(prefill: AgentProcess) -> None:
    table, as_json = status(prefill.peer), status(prefill.peer, "--json")

    assert (table.exit_code, as_json.exit_code) == (0, 0)
    for text in (prefill.settings["agent_id"], "serving", "lends memory at"):
        assert text in table.stdout
    assert "memory.sock" in "".join(table.stdout.split())
    assert json.loads(as_json.stdout)["counts"] == dict.fromkeys(prefill.status()["counts"], 0)


def test_missing_history_and_peer_address_of_http_are_errors(prefill: AgentProcess) -> None:
    at = prefill.settings["http_bind"]

    of_http = status(f"tcp://{at}", "--timeout", "1")

    assert of_http.exit_code == 1
    assert f"its http_bind is there: kvbus status {at}" in of_http.stderr
    for kind in ("fetch", "offer"):
        result = status(prefill.peer, f"--{kind}", "nosuch")
        unknown = f"{kind}_unknown: no {kind} 'nosuch' is known there, or no longer"
        assert (result.exit_code, "serving" in result.stdout) == (1, True)
        assert result.stderr == f"error: {prefill.peer}: {unknown}\n"


def test_no_answer_is_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    at = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("KVBUS_HTTP_BIND", at)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        default, named = status("--every", "0.1"), status(endpoint, "--timeout", "0.1")

    assert (default.exit_code, named.exit_code, default.stdout + named.stdout) == (1, 1, "")
    assert default.stderr == (
        f"error: no agent answered (http://{at}: no answer: Connection refused); name one: "
        "kvbus status HOST:PORT, its http_bind, or tcp://HOST:PORT, its peer address\n"
    )
    assert named.stderr == (
        f"error: no agent answered at {endpoint} within 0.1 s; to check the way there, run "
        f"kvbus doctor --only peer --peer {endpoint}\n"
    )


def test_a_missing_engine_and_a_needed_token_are_shown(fresh: Agents, folder: Path) -> None:
    token_file = folder / "token"
    token_file.write_text("a-token-of-some-length\n")
    token_file.chmod(0o600)
    agent = fresh.prepare("prefill", ready_needs_engine=True, http_token_file=str(token_file))
    fresh.start(agent)

    shown, of_http = status(agent.peer), status(str(agent.settings["http_bind"]))

    assert "no engine is attached" in shown.stdout
    assert "Start one; the agent's log lists the refused ones." in shown.stdout
    assert of_http.exit_code == 1
    assert "here by --token-file FILE" in of_http.stderr


def test_lines_of_the_log_that_a_full_disk_loses_are_counted(folder: Path) -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    wanted = {"agent_id": "p", "peer_bind": at, "events_bind": "tcp://127.0.0.1:0"}
    write_config(folder / "p.toml", {**wanted, "runtime_dir": str(folder / "run")})
    command = [sys.executable, "-m", "kvbus_prefill", str(folder / "p.toml")]
    with Path("/dev/full").open("wb") as full, subprocess.Popen(command, stderr=full) as agent:
        try:
            wait_until(lambda: status(at).exit_code == 0, "the agent answers")
            shown = status(at)
        finally:
            agent.terminate()

    assert "lines of the log could not be written" in shown.stdout


def test_engines_that_are_not_mapped_for_one_reason_are_one_line() -> None:
    engines = {"p-1": "open", "p-2": "elsewhere", "p-3": "elsewhere", "p-4": "closed"}
    told = told_by("decode", sharing={"engines": engines}, silent_peers={"tcp://h:1": 13.0})
    with played_agent(told) as endpoint:
        lines = [" ".join(line.split()) for line in status(endpoint).stdout.splitlines()]

    assert [line for line in lines if line.startswith("memory of")] == [
        "memory of p-1 mapped here",
        "memory of 2 engines not mapped: elsewhere",
        "memory of p-4 not mapped: closed",
    ]
    assert "peer tcp://h:1 has not answered for 13 s" in lines
