"""What goes wrong while an agent is replaced: it goes on then, and its engines with it."""

import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import msgpack
import pytest
import torch
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.engine import DecodeSession, Offer, PrefillSession
from kvbus.errors import PeerLost
from kvbus.memory.attach import ProcessEnd
from kvbus.protocol import Outcome
from kvbus.spawn import free_port
from tests.agents import AgentProcess, until
from tests.engines import FULL, engine
from tests.faults.conftest import Started
from tests.faults.kept_engines import BLOCKS_EACH, NUM_TOKENS, KeptEngine, kept_engine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
GIVEN, TAKEN = list(range(BLOCKS_EACH)), list(range(BLOCKS_EACH, 2 * BLOCKS_EACH))


def range_of(num_ports: int) -> str:
    first = free_port()
    return f"tcp://127.0.0.1:{first}-{first + num_ports - 1}"


@dataclass
class Engines:
    """A prefill and a decode engine with kept sessions."""

    source: KeptEngine[PrefillSession]
    target: KeptEngine[DecodeSession]
    num: int = 0

    async def offer(self) -> Offer:
        """An offer of the source's latest session, of a pattern of its own."""
        self.num += 1
        self.source.write(GIVEN, self.pattern)
        session = await self.source.control.opened()
        return await session.offer(
            f"r{self.num}", num_tokens=NUM_TOKENS, block_ids={FULL.name: GIVEN}
        )

    @property
    def pattern(self) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), self.num, dtype=torch.int16)

    async def fetch(self, offer: Offer) -> None:
        """Read it, and see that the bytes are right."""
        session = await self.target.control.opened()
        fetch = session.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids={FULL.name: TAKEN})
        await fetch.completed()
        assert self.target.holds(TAKEN, self.pattern)
        assert await offer.released() is Outcome.COMPLETED

    async def hand_over(self) -> None:
        await self.fetch(await self.offer())


@pytest.fixture
async def old(fresh: Started) -> AgentProcess:
    """A prefill agent that can be replaced."""
    fresh.start(agent := fresh.prefill())
    return agent


@pytest.fixture
async def engines(fresh: Started, old: AgentProcess) -> AsyncIterator[Engines]:
    """Engines of it, and of a decode agent."""
    fresh.start(decode := fresh.decode())
    async with (
        kept_engine(PrefillSession, old.attach, num_blocks=16) as source,
        kept_engine(DecodeSession, decode.attach, num_blocks=16) as target,
    ):
        yield Engines(source, target)


async def in_thread(call: Callable[[], Any]) -> Any:
    with anyio.fail_after(120):
        return await anyio.to_thread.run_sync(call)


async def take_over(fresh: Started, old: AgentProcess) -> AgentProcess:
    """Start a successor, and return it once it serves."""
    successor = fresh.successor(old)
    successor.launch()
    await in_thread(successor.wait_started)
    return successor


async def refused(fresh: Started, old: AgentProcess, **settings: Any) -> str:
    """What a successor says that does not get the place."""
    successor = fresh.successor(old)
    successor.settings |= settings
    successor.expected_trouble = {"not json"}
    successor.launch()
    assert await in_thread(successor.exit_status) == 1
    return "\n".join(line for line in successor.lines() if line.startswith("error: "))


@pytest.mark.long
async def test_a_successor_that_cannot_start_changes_nothing(fresh: Started) -> None:
    fresh.start(old := fresh.prefill(peer_bind=range_of(1), events_bind=range_of(2)))
    said = await refused(fresh, old)

    assert "cannot bind" in said
    assert old.alive
    assert not old.logged("agent.replacing")
    assert old.status()["successor"] == ""


async def test_an_agent_that_is_stopped_is_named_and_goes_on_when_it_is_woken(
    fresh: Started, old: AgentProcess, engines: Engines
) -> None:
    old.signal(signal.SIGSTOP)
    try:
        said = await refused(fresh, old)
    finally:
        old.signal(signal.SIGCONT)

    assert f"process {old.pid}" in said
    assert "kill -CONT" in said
    await engines.hand_over()
    assert not old.logged("agent.replacing")


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
async def test_engines_go_back_when_the_successor_ends_and_over_to_the_next_one(
    fresh: Started, old: AgentProcess, engines: Engines, end: signal.Signals
) -> None:
    await engines.hand_over()
    held = await engines.offer()  # keeps the old agent from its end
    first = engines.source.control.session
    successor = await take_over(fresh, old)
    await until(lambda: engines.source.control.session is not first)
    assert old.status()["successor"] == successor.started["boot_id"]
    assert successor.status()["predecessor"] == old.peer
    said = [await in_thread(partial(status_text, one.peer)) for one in (old, successor)]
    assert f"replaced by {successor.started['boot_id']}" in said[0]
    assert old.peer in said[1]

    with seen_at(old) as seen:
        successor.signal(end)
        with anyio.fail_after(30):
            await seen.wait()  # who connects sees the process that lets it in
    await in_thread(lambda: old.says("agent.resumed"))
    await until(lambda: engines.source.control.session is first)
    await engines.fetch(held)
    await engines.hand_over()
    assert old.status()["successor"] == ""

    await take_over(fresh, old)
    assert await in_thread(old.exit_status) == 0
    await engines.hand_over()


@pytest.mark.long
async def test_what_was_offered_before_is_read_from_the_old_agent_whatever_is_sent_to_it(
    fresh: Started, old: AgentProcess, engines: Engines
) -> None:
    held = await engines.offer()
    first = engines.source.control.session
    successor = await take_over(fresh, old)
    await until(lambda: engines.source.control.session is not first)
    old.signal(signal.SIGTERM)  # as a supervisor may, once the successor is there
    third = fresh.successor(successor)
    third.launch()
    await in_thread(lambda: third.says("agent.waiting"))

    assert old.alive
    await engines.fetch(held)
    assert await in_thread(old.exit_status) == 0
    await in_thread(third.wait_started)
    assert await in_thread(successor.exit_status) == 0
    await engines.hand_over()


@pytest.mark.long
async def test_an_agent_whose_engines_do_not_go_in_time_ends_all_the_same(fresh: Started) -> None:
    fresh.start(old := fresh.prefill(drain_timeout_s=1.0))
    async with kept_engine(PrefillSession, old.attach, num_blocks=16) as source:
        session = await source.control.opened()
        held = await session.offer("r", num_tokens=NUM_TOKENS, block_ids={FULL.name: GIVEN})
        await take_over(fresh, old)

        assert await in_thread(old.exit_status) == 0
        assert old.logged("agent.replaced", in_time=False)
        with anyio.fail_after(30):
            assert await ended(held.released) in (Outcome.WITHDRAWN, None)
        await until(lambda: source.control.session not in (None, session))


async def ended(wait: Callable[[], Awaitable[Outcome]]) -> Outcome | None:
    try:
        return await wait()
    except PeerLost:
        return None


async def test_an_engine_that_cannot_follow_is_named_and_keeps_its_agent(
    fresh: Started, old: AgentProcess
) -> None:
    async with engine(PrefillSession, old.attach, seed=1) as source:
        said = await refused(fresh, old)

    assert source.spec.engine_id in said
    assert not old.logged("agent.replacing")


@pytest.mark.parametrize(
    "last_step", [pytest.param("hand_over", marks=pytest.mark.long), "taken_over"]
)
async def test_a_successor_that_hangs_up_in_the_middle_leaves_the_place_as_it_was(
    old: AgentProcess, engines: Engines, last_step: str
) -> None:
    session = engines.source.control.session
    with successor_up_to(last_step, old):
        pass
    if last_step == "taken_over":
        await in_thread(lambda: old.says("agent.resumed"))
    await engines.hand_over()
    assert engines.source.control.session is session

    with seen_at(old) as seen:
        old.kill()
        with anyio.fail_after(30):
            await seen.wait()


@contextmanager
def seen_at(agent: AgentProcess) -> Iterator[ProcessEnd]:
    """The end of the process that who connects now sees at the other end."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(agent.attach))
        end = ProcessEnd(connected)
        yield end
        end.close()


def status_text(endpoint: str) -> str:
    """What ``kvbus status`` says of the agent there."""
    return CliRunner().invoke(app, ["status", endpoint]).output


async def test_an_agent_that_is_to_end_serves_its_engines_until_they_have_gone_over(
    old: AgentProcess, engines: Engines
) -> None:
    with successor_up_to("taken_over", old):  # which lets nobody in
        await in_thread(lambda: old.says("agent.replacing"))
        old.signal(signal.SIGTERM)
        for _ in range(5):
            await engines.hand_over()

    await in_thread(lambda: old.says("agent.draining"))
    assert await in_thread(old.exit_status) == 0


@contextmanager
def successor_up_to(last_step: str, old: AgentProcess) -> Iterator[None]:
    """A successor that takes the steps up to this one, and hangs up at the end."""
    wanted = {"agent_id": old.settings["agent_id"], "role": "prefill", "agent_boot": "b" * 32}
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(old.attach))
        listener, lock = said_to(connected, "hand_over", wanted)
        with socket.socket(socket.AF_UNIX) as second:
            second.connect(str(old.attach))
            with pytest.raises(AssertionError, match="has asked before"):
                said_to(second, "hand_over", wanted)
        with socket.socket(fileno=listener) as place:
            place.listen()  # who connects sees this process now
            if last_step == "taken_over":
                assert said_to(connected, "taken_over", {}) == []
        os.close(lock)
        yield


def said_to(connected: socket.socket, op: str, body: dict[str, str]) -> list[int]:
    """Send one message; the descriptors that come with the answer, which must be ok."""
    message = msgpack.packb({"op": op, "body": body})
    connected.sendall(len(message).to_bytes(4, "little") + message)
    answer, fds, *_ = socket.recv_fds(connected, 65_536, 8)
    said = msgpack.unpackb(answer[4:])
    assert "ok" in said, said
    return list(fds)


@pytest.mark.long
async def test_another_agent_cannot_take_the_place(fresh: Started, old: AgentProcess) -> None:
    said = await refused(fresh, old, agent_id="another")

    assert f"prefill agent '{old.settings['agent_id']}'" in said
    assert old.status()["successor"] == ""
