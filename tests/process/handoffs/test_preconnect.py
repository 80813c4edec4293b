"""Agents that are listed are met before the first fetch; what fails there fails no fetch."""

from pathlib import Path
from typing import Any

import pytest

from kvbus.protocol import Role
from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import Engine, begin, engine, make_spec, pair, works
from tests.support.keyring import KeyRing

pytestmark = pytest.mark.anyio


def warming(
    agents: Agents, *, ahead: str = "anybody", **settings: Any
) -> tuple[AgentProcess, AgentProcess]:
    """A prefill agent, and a decode agent that has it in its configuration."""
    prefill = agents.prepare("prefill", shake_hands_ahead=ahead)
    peers = [prefill.settings["peer_bind"]]
    decode = agents.prepare("decode", peers=peers, **settings)
    agents.start(prefill, decode)
    return prefill, decode


async def warm(decode: AgentProcess) -> None:
    await until(lambda: decode.metric("connected_peers") == 1)


async def hands_were_shaken(source: Engine, target: Engine, decode: AgentProcess) -> bool:
    """Whether a handoff found hands shaken."""
    handoff = await begin(source, target)
    await handoff.completed()
    (line,) = decode.says("handoff.completed", fetch_id=handoff.fetch.fetch_id)
    return bool(line["resolving_ms"] == 0)


@pytest.mark.parametrize("how", ["read", "mapped", "with keys"])
async def test_the_first_fetch_finds_hands_shaken(fresh: Agents, tmp_path: Path, how: str) -> None:
    if how == "with keys":  # those of decode agents may
        ring = KeyRing(tmp_path)
        prefill = ring.prepare(fresh, Role.PREFILL, "prefill")
        listing = f"{prefill.settings['peer_bind']} {ring.pair('prefill').public}"
        decode = ring.prepare(fresh, Role.DECODE, "decode", peers=[listing])
        fresh.start(prefill, decode)
    else:
        prefill, decode = warming(fresh, mapped=how == "mapped")
    async with pair(prefill.attach, decode.attach) as engines:
        await warm(decode)

        assert await hands_were_shaken(*engines, decode)

    assert decode.says("handoff.completed")[0]["path"] == (
        "mapped" if how == "mapped" else "direct"
    )
    assert len(decode.says("handshake.done")) == 1
    assert decode.says("peer.connected", num_routes=1)


async def test_late_engine_and_restarted_agent_are_met_ahead(
    fresh: Agents,
) -> None:
    prefill, decode = warming(fresh)
    async with engine(decode.attach) as target:
        for _ in range(2):  # the second is another process with the id of the first
            decode.skip_log()
            async with engine(prefill.attach, make_spec(engine_id="p")) as source:
                await until(lambda: decode.logged("route.connected"))

                assert await hands_were_shaken(source, target, decode)
        prefill.kill()
        await until(lambda: decode.logged("peer.lost"))
        decode.skip_log()
        prefill.start()
        async with engine(prefill.attach) as source:
            await until(lambda: decode.logged("route.connected"))

            assert await hands_were_shaken(source, target, decode)


async def test_unmet_peer_is_logged_once_with_reason_then_met_later(
    decode: AgentProcess, fresh: Agents
) -> None:
    closed = fresh.prepare("prefill", shake_hands_ahead="keys")
    away = fresh.prepare("prefill", shake_hands_ahead="anybody")
    peers = [closed.settings["peer_bind"], away.settings["peer_bind"], decode.peer]
    reader = fresh.prepare("decode", peers=peers, request_timeout_s=1.0)
    fresh.start(closed, reader)
    async with pair(closed.attach, reader.attach) as engines:
        await until(lambda: len(reader.logged("peer.cold")) == len(peers))
        fresh.start(away)
        assert await works(*engines)
        async with engine(away.attach):
            await until(lambda: reader.metric("connected_peers") == 2)

    why = {line["peer"]: line["reason"] for line in reader.logged("peer.cold")}
    assert len(reader.logged("peer.cold")) == len(why) == len(peers)
    assert "shake_hands_ahead = 'keys', and it has no keys" in why[closed.peer]
    assert "is a decode agent" in why[decode.peer]


async def test_engines_of_another_model_are_asked_once_and_left_alone(fresh: Agents) -> None:
    prefill, decode = warming(fresh)
    async with (
        engine(decode.attach, make_spec(model="another")),
        pair(prefill.attach, decode.attach),
    ):
        await until(lambda: len(decode.logged("route.connected")) == 1)
        async with engine(decode.attach):  # all pairs are looked at again
            await until(lambda: len(decode.logged("route.connected")) == 2)
            await warm(decode)

    assert len(decode.says("handshake.refused", code="incompatible")) == 1
    assert not decode.logged("peer.cold")


async def test_what_is_listed_is_not_left_for_being_idle(
    prefill: AgentProcess, fresh: Agents
) -> None:
    """One that is not listed is: longer than that is waited for here."""
    listed, decode = warming(fresh, idle_peer_s=0.4)
    async with engine(decode.attach) as target:
        async with engine(prefill.attach) as other:
            assert await works(other, target)
        async with engine(listed.attach) as source:
            await warm(decode)
            await until(lambda: decode.logged("peer.left"))

            assert await hands_were_shaken(source, target, decode)
            assert await works(source, target)

    assert {line["peer"] for line in decode.logged("peer.left")} == {prefill.peer}
