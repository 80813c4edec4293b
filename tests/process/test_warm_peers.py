"""Agents that are listed are met before the first fetch; what fails there fails no fetch."""

from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.keys import Role
from tests.agents import AgentProcess, Agents, until
from tests.engines import Engine, engine, make_spec, pair, works
from tests.keyring import KeyRing

pytestmark = pytest.mark.anyio

SOON: dict[str, Any] = {"peers_refresh_s": 0.2}


def started(
    agents: Agents, *, ahead: str = "anybody", **settings: Any
) -> tuple[AgentProcess, AgentProcess]:
    """A prefill agent, and a decode agent that has it in its configuration."""
    prefill = agents.prepare("prefill", shake_hands_ahead=ahead)
    peers = [prefill.settings["peer_bind"]]
    decode = agents.prepare("decode", peers=peers, **{"peers_refresh_s": 60.0, **settings})
    agents.start(prefill, decode)
    return prefill, decode


async def warm(decode: AgentProcess) -> None:
    await until(lambda: decode.metric("warm_peers") == 1)


async def hand_off(source: Engine, target: Engine, decode: AgentProcess) -> Any:
    """One handoff; what the log says of it."""
    blocks = source.some_blocks(1, 32), target.some_blocks(2, 32)
    offer = await source.prefill.offer("r", num_tokens=32, block_ids=blocks[0])
    fetch = target.decode.fetch(offer.ticket, num_tokens=32, block_ids=blocks[1])
    await fetch.completed()
    await offer.released()
    return decode.says("handoff.completed", fetch_id=fetch.fetch_id)[0]


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
async def test_the_first_fetch_finds_hands_shaken_and_a_read_done(
    fresh: Agents, mapped: bool
) -> None:
    """Mapped memory needs no read."""
    prefill, decode = started(fresh, mapped=mapped)
    async with pair(prefill.attach, decode.attach) as (source, target):
        await warm(decode)
        done = await hand_off(source, target, decode)

    assert done["resolving_ms"] == 0
    assert (done["path"] == "mapped") == mapped
    assert len(decode.says("handshake.done")) == 1
    assert decode.says("route.warmed", num_first_reads=int(not mapped))
    assert decode.says("peer.warmed", num_routes=1)


async def test_an_engine_that_comes_later_and_an_agent_that_comes_back_are_met(
    fresh: Agents,
) -> None:
    prefill, decode = started(fresh)
    async with engine(DecodeSession, decode.attach) as target:
        for _ in range(2):  # the second is another process with the id of the first
            decode.skip_log()
            async with engine(PrefillSession, prefill.attach, make_spec(engine_id="p")) as source:
                await until(lambda: decode.logged("route.warmed"))

                assert (await hand_off(source, target, decode))["resolving_ms"] == 0
        prefill.kill()
        await until(lambda: decode.logged("peer.lost"))
        decode.skip_log()
        prefill.start()
        async with engine(PrefillSession, prefill.attach) as source:
            await until(lambda: decode.logged("route.warmed"))

            assert (await hand_off(source, target, decode))["resolving_ms"] == 0


async def test_a_file_of_peers_is_followed(fresh: Agents, tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_text("")
    prefill = fresh.prepare("prefill", shake_hands_ahead="anybody")
    decode = fresh.prepare("decode", peers_file=str(path), **SOON)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach):
        path.write_text(f"{prefill.peer}\n")
        await warm(decode)
        path.write_text("# none\n")
        await until(lambda: decode.metric("listed_peers") == 0)

        assert decode.metric("warm_peers") == 0


async def test_an_agent_that_is_away_is_said_once_and_met_when_it_comes(fresh: Agents) -> None:
    prefill = fresh.prepare("prefill", shake_hands_ahead="anybody")
    peers = [prefill.settings["peer_bind"]]
    decode = fresh.prepare("decode", peers=peers, request_timeout_s=0.2, **SOON)
    fresh.start(decode)
    await until(lambda: decode.logged("peer.cold"))
    fresh.start(prefill)
    async with pair(prefill.attach, decode.attach):
        await warm(decode)

    assert len(decode.logged("peer.cold")) == 1


async def test_who_may_not_shake_hands_ahead_does_so_with_the_first_ticket(fresh: Agents) -> None:
    prefill, decode = started(fresh, ahead="keys", **SOON)
    async with pair(prefill.attach, decode.attach) as (source, target):
        (cold,) = decode.says("peer.cold", code="forbidden")
        await hand_off(source, target, decode)
        await warm(decode)

    assert "shake_hands_ahead = 'keys', and it has no keys" in cold["reason"]


async def test_with_keys_those_of_decode_agents_may(fresh: Agents, tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    prefill = ring.prepare(fresh, Role.PREFILL, "prefill")
    listing = f"{prefill.settings['peer_bind']} {ring.pair('prefill').public}"
    decode = ring.prepare(fresh, Role.DECODE, "decode", peers=[listing])
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        await warm(decode)

        assert (await hand_off(source, target, decode))["resolving_ms"] == 0


async def test_a_decode_agent_is_no_peer_to_warm(decode: AgentProcess, fresh: Agents) -> None:
    one = fresh.prepare("decode", peers=[decode.peer])
    fresh.start(one)

    (cold,) = one.says("peer.cold")

    assert "is a decode agent" in cold["reason"]


async def test_engines_of_another_model_are_asked_once_and_left_alone(fresh: Agents) -> None:
    prefill, decode = started(fresh)
    async with (
        engine(DecodeSession, decode.attach, make_spec(model="another")),
        pair(prefill.attach, decode.attach),
    ):
        await until(lambda: len(decode.logged("route.warmed")) == 1)
        async with engine(DecodeSession, decode.attach):  # all pairs are looked at again
            await until(lambda: len(decode.logged("route.warmed")) == 2)
            await warm(decode)

    assert len(decode.says("handshake.refused", code="incompatible")) == 1
    assert not decode.logged("peer.cold")


async def test_what_is_listed_is_not_left_for_being_idle(
    prefill: AgentProcess, fresh: Agents
) -> None:
    """One that is not listed is: longer than that is waited for here."""
    listed, decode = started(fresh, idle_peer_s=0.4, **SOON)
    async with engine(DecodeSession, decode.attach) as target:
        async with engine(PrefillSession, prefill.attach) as other:
            assert await works(other, target)
        async with engine(PrefillSession, listed.attach) as source:
            await warm(decode)
            await until(lambda: decode.logged("peer.left"))

            assert (await hand_off(source, target, decode))["resolving_ms"] == 0
            assert await works(source, target)

    assert {line["peer"] for line in decode.logged("peer.left")} == {prefill.peer}
