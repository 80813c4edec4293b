"""Agents that are listed are met before the first fetch; what fails there fails no fetch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.keys import Role
from kvbus.spawn import free_port
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.engines import Engine, engine, make_spec, pair, works
from tests.keyring import KeyRing

pytestmark = pytest.mark.anyio

SOON = {"peers_refresh_s": 0.2}


@pytest.fixture
def agents() -> Iterator[Agents]:
    """Agents of one test."""
    with agents_ended(Agents) as agents:
        yield agents
        agents.check()


@pytest.fixture
def prefill(agents: Agents) -> AgentProcess:
    """An agent that shakes hands with anybody."""
    agent: AgentProcess = agents.prepare("prefill", shake_hands_ahead="anybody")
    return agent


@pytest.fixture
def decode(agents: Agents, prefill: AgentProcess) -> AgentProcess:
    """One that has that one in its configuration."""
    peers = [prefill.settings["peer_bind"]]
    agent: AgentProcess = agents.prepare("decode", peers=peers, peers_refresh_s=60.0)
    return agent


async def warm(decode: AgentProcess, number: int = 1) -> None:
    await until(lambda: decode.metric("warm_peers") == number)


async def hand_off(source: Engine, target: Engine, decode: AgentProcess) -> Any:
    """One handoff; what the log says of it."""
    blocks = source.some_blocks(1, 32), target.some_blocks(2, 32)
    offer = await source.prefill.offer("r", num_tokens=32, block_ids=blocks[0])
    fetch = target.decode.fetch(offer.ticket, num_tokens=32, block_ids=blocks[1])
    await fetch.completed()
    await offer.released()
    return decode.says("handoff.completed", fetch_id=fetch.fetch_id)[0]


async def test_the_first_fetch_finds_hands_shaken_and_a_read_done(agents, prefill, decode) -> None:
    agents.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        await warm(decode)
        done = await hand_off(source, target, decode)

    assert done["resolving_ms"] == 0
    assert len(decode.logged("handshake.done")) == 1
    assert decode.logged("route.warmed", num_first_reads=1)
    assert decode.logged("peer.warmed", num_routes=1)


async def test_mapped_memory_needs_no_read(agents, prefill, decode) -> None:
    decode.settings["mapped"] = True
    agents.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        await warm(decode)
        done = await hand_off(source, target, decode)

    assert done["path"] == "mapped"
    assert decode.logged("route.warmed", num_first_reads=0)


async def test_an_engine_that_comes_later_is_met_at_once(agents, prefill, decode) -> None:
    agents.start(prefill, decode)
    async with engine(DecodeSession, decode.attach) as target:
        for _ in range(2):  # the second is another process with the id of the first
            decode.skip_log()
            async with engine(PrefillSession, prefill.attach, make_spec(engine_id="p")) as source:
                await until(lambda: decode.logged("route.warmed"))

                assert (await hand_off(source, target, decode))["resolving_ms"] == 0
    async with pair(prefill.attach, decode.attach) as (source, target):
        await until(lambda: decode.logged("route.warmed", engine_id=source.spec.engine_id))

        assert (await hand_off(source, target, decode))["resolving_ms"] == 0


async def test_an_agent_that_comes_back_is_met_again(agents, prefill, decode) -> None:
    agents.start(prefill, decode)
    async with engine(DecodeSession, decode.attach) as target:
        async with engine(PrefillSession, prefill.attach):
            await warm(decode)
        prefill.kill()
        await until(lambda: decode.logged("peer.lost"))
        prefill.start()
        async with engine(PrefillSession, prefill.attach) as source:
            await until(lambda: len(decode.logged("route.warmed")) == 2)

            assert (await hand_off(source, target, decode))["resolving_ms"] == 0


async def test_a_file_of_peers_is_followed(agents, prefill, tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_text("")
    decode = agents.prepare("decode", peers_file=str(path), **SOON)
    agents.start(prefill, decode)
    async with pair(prefill.attach, decode.attach):
        path.write_text(f"{prefill.peer}\n")
        await warm(decode)
        path.write_text("# none\n")
        await until(lambda: decode.metric("listed_peers") == 0)

        assert decode.metric("warm_peers") == 0


async def test_an_agent_that_is_away_is_said_once_and_met_when_it_comes(agents, prefill) -> None:
    peers = [prefill.settings["peer_bind"]]
    decode = agents.prepare("decode", peers=peers, request_timeout_s=0.2, **SOON)
    agents.start(decode)
    await until(lambda: decode.logged("peer.cold"))
    agents.start(prefill)
    async with pair(prefill.attach, decode.attach):
        await warm(decode)

    assert len(decode.logged("peer.cold")) == 1


async def test_who_may_not_shake_hands_ahead_does_so_with_the_first_ticket(agents) -> None:
    prefill = agents.prepare("prefill")
    decode = agents.prepare("decode", peers=[prefill.settings["peer_bind"]], **SOON)
    agents.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        (cold,) = decode.says("peer.cold", code="forbidden")
        await hand_off(source, target, decode)
        await warm(decode)

    assert "shake_hands_ahead = 'keys', and it has no keys" in cold["reason"]


async def test_with_keys_those_of_decode_agents_may(agents, tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    prefill = ring.prepare(agents, Role.PREFILL, "prefill")
    listing = f"{prefill.settings['peer_bind']} {ring.pair('prefill').public}"
    decode = ring.prepare(agents, Role.DECODE, "decode", peers=[listing])
    agents.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        await warm(decode)

        assert (await hand_off(source, target, decode))["resolving_ms"] == 0


async def test_a_decode_agent_is_no_peer_to_warm(agents) -> None:
    other = agents.prepare("decode")
    decode = agents.prepare("decode", peers=[other.settings["peer_bind"]])
    agents.start(other, decode)

    (cold,) = decode.says("peer.cold")

    assert "is a decode agent" in cold["reason"]


async def test_engines_of_another_model_are_asked_once_and_left_alone(
    agents, prefill, decode
) -> None:
    agents.start(prefill, decode)
    async with (
        engine(DecodeSession, decode.attach, make_spec(model="another")),
        pair(prefill.attach, decode.attach),
    ):
        await until(lambda: len(decode.logged("route.warmed")) == 1)
        async with engine(DecodeSession, decode.attach):  # all pairs are looked at again
            await until(lambda: len(decode.logged("route.warmed")) == 2)
            await warm(decode)

    assert len(decode.logged("handshake.refused", code="incompatible")) == 1
    assert not decode.logged("peer.cold")


async def test_what_is_listed_is_not_left_for_being_idle(agents, prefill) -> None:
    peers = [prefill.settings["peer_bind"]]
    decode = agents.prepare("decode", peers=peers, idle_peer_s=0.4, **SOON)
    agents.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        await warm(decode)
        other = agents.prepare("prefill", peer_bind=f"tcp://127.0.0.1:{free_port()}")
        agents.start(other)  # takes longer than an idle peer is kept

        assert (await hand_off(source, target, decode))["resolving_ms"] == 0
        assert await works(source, target)

    assert not decode.logged("peer.left")
