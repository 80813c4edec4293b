"""Listed agents are connected before the first fetch; a failure there fails no fetch."""

from pathlib import Path
from typing import Any

import pytest

from kvbus.protocol import Role
from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import Engine, begin, engine, make_spec, pair, works
from tests.support.keyring import KeyRing

pytestmark = pytest.mark.anyio


def listed_pair(
    agents: Agents, *, shakes: str = "anybody", **settings: Any
) -> tuple[AgentProcess, AgentProcess]:
    prefill = agents.prepare("prefill", shake_hands_ahead=shakes)
    peers = [prefill.settings["peer_bind"]]
    decode = agents.prepare("decode", peers=peers, **settings)
    agents.start(prefill, decode)
    return prefill, decode


async def connected(decode: AgentProcess) -> None:
    await until(lambda: decode.metric("connected_peers") == 1)


async def was_connected(source: Engine, target: Engine, decode: AgentProcess) -> bool:
    handoff = await begin(source, target)
    await handoff.completed()
    (line,) = decode.says("handoff.completed", fetch_id=handoff.fetch.fetch_id)
    return bool(line["resolving_ms"] == 0)


@pytest.mark.parametrize("how", ["mapped", "with keys"])
async def test_first_fetch_needs_no_handshake(fresh: Agents, tmp_path: Path, how: str) -> None:
    if how == "with keys":  # decode agents may
        ring = KeyRing(tmp_path)
        prefill = ring.prepare(fresh, Role.PREFILL, "prefill")
        listing = f"{prefill.settings['peer_bind']} {ring.pair('prefill').public}"
        decode = ring.prepare(fresh, Role.DECODE, "decode", peers=[listing])
        fresh.start(prefill, decode)
    else:
        prefill, decode = listed_pair(fresh, mapped=how == "mapped")
    async with pair(prefill.attach, decode.attach) as engines:
        await connected(decode)
        assert await was_connected(*engines, decode)
    assert decode.says("handoff.completed")[0]["path"] == (
        "mapped" if how == "mapped" else "direct"
    )
    assert len(decode.says("handshake.done")) == 1
    assert decode.says("peer.connected", num_routes=1)


async def test_late_engine_and_restarted_agent_are_preconnected(fresh: Agents) -> None:
    prefill, decode = listed_pair(fresh)
    async with engine(decode.attach) as target:
        for _ in range(2):  # the second is another process with the id of the first
            decode.skip_log()
            async with engine(prefill.attach, make_spec(engine_id="p")) as source:
                await until(lambda: decode.logged("route.connected"))
                assert await was_connected(source, target, decode)
        prefill.kill()
        await until(lambda: decode.logged("peer.lost"))
        decode.skip_log()
        prefill.start()
        async with engine(prefill.attach) as source:
            await until(lambda: decode.logged("route.connected"))
            assert await was_connected(source, target, decode)


async def test_unreachable_peer_is_logged_once_and_connected_later(
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


async def test_engines_of_another_model_are_refused_once(fresh: Agents) -> None:
    prefill, decode = listed_pair(fresh)
    async with (
        engine(decode.attach, make_spec(model="another")),
        pair(prefill.attach, decode.attach),
    ):
        await until(lambda: len(decode.logged("route.connected")) == 1)
        async with engine(decode.attach):
            await until(lambda: len(decode.logged("route.connected")) == 2)
            await connected(decode)
    assert len(decode.says("handshake.refused", code="incompatible")) == 1
    assert not decode.logged("peer.cold")


async def test_idle_peer_is_left_unless_it_is_listed(prefill: AgentProcess, fresh: Agents) -> None:
    listed, decode = listed_pair(fresh, idle_peer_s=0.4)
    async with engine(decode.attach) as target:
        async with engine(prefill.attach) as other:
            assert await works(other, target)
        async with engine(listed.attach) as source:
            await connected(decode)
            await until(lambda: decode.logged("peer.left"))
            assert await was_connected(source, target, decode)
            assert await works(source, target)
    assert {line["peer"] for line in decode.logged("peer.left")} == {prefill.peer}
