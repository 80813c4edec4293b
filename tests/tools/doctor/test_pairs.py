"""``kvbus doctor --peer --from`` of agents that run, and of an interface without a link."""

from functools import partial

import anyio
import pytest

from kvbus.protocol import Role
from tests.support.agents import AgentProcess, Agents, until
from tests.support.engines import engine, failure_of, make_spec, pair, works
from tests.support.keyring import OBSERVER, KeyRing
from tests.tools.doctor.running import Findings, doctor, severities

pytestmark = pytest.mark.anyio

KVBUS = "from kvbus.cli import app; app()"


async def look_at(*arguments: str) -> Findings:
    found = await anyio.to_thread.run_sync(partial(doctor, "--only", "peer", *arguments))
    return {name.removeprefix("peer."): one for name, one in found.items()}


async def look_at_pair(prefill: AgentProcess, decode: AgentProcess) -> Findings:
    return await look_at("--peer", prefill.peer, "--from", decode.peer)


async def test_a_pair_that_is_warm_is_ok_and_looked_at_from_both_sides(fresh: Agents) -> None:
    # Its tickets name another host than the list does.
    prefill = fresh.prepare("prefill", shake_hands_ahead="anybody", advertise_host="localhost")
    decode = fresh.prepare("decode", peers=[prefill.settings["peer_bind"]], mapped=True)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach):
        await until(lambda: decode.metric("connected_peers") == 1)

        alone = await look_at("--peer", prefill.peer)
        found = await look_at_pair(prefill, decode)

    of_one = ("socket", "faults", "packets", "data", "clock", "one_machine")
    of_both = ("from", "reader_faults", "roles", "keys", "handshake")
    assert severities(alone) == dict.fromkeys(of_one, "ok")
    assert severities(found) == dict.fromkeys(of_one + of_both, "ok")
    assert found["handshake"]["found"] == "listed and connected, routes known: 1"
    assert found["one_machine"]["found"].endswith("its memory can be mapped")


async def test_a_handshake_that_was_refused_is_told_until_one_is_done(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill"), fresh.prepare("decode")
    fresh.start(prefill, decode)
    async with (
        pair(prefill.attach, decode.attach) as (source, target),
        engine(decode.attach, make_spec(model="another"), seed=3) as other,
    ):
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        fetch = other.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
        failure = await failure_of(fetch)

        refused = await look_at_pair(prefill, decode)
        assert await works(source, target)
        done = await look_at_pair(prefill, decode)
        await offer.withdraw()

    # The path is that of the decode agent, and not of this shell.
    assert "closed by the decode agent's config" in refused["one_machine"]["found"]
    assert refused["handshake"]["severity"] == "error"
    assert failure.message in refused["handshake"]["found"]
    assert severities(done)["handshake"] == "ok"
    assert severities(done)["reader_faults"] == "warning"
    assert failure.message in done["reader_faults"]["found"]
    assert "its NIXL takes connections at" in done["data"]["found"]


async def test_agent_never_met_is_asked_with_its_own_key_and_known(fresh: Agents) -> None:
    ring = KeyRing(fresh.folder)
    prefill = ring.prepare(fresh, Role.PREFILL, "p", advertise_host="localhost")
    at, strange = prefill.settings["peer_bind"], ring.pair("stranger").public
    decode = ring.prepare(fresh, Role.DECODE, "d", peers=[f"{at} {strange}"])
    fresh.start(prefill, decode)
    decode.says("peer.cold")
    keys = [
        f"--{of}server-key={ring.pair(name).public}" for of, name in (("", "p"), ("from-", "d"))
    ]

    found = await look_at(
        *("--peer", at, "--from", decode.peer, "--key-file", str(ring.secret_path(OBSERVER))), *keys
    )

    assert (severities(found)["from"], severities(found)["keys"]) == ("ok", "ok")
    assert found["handshake"]["severity"] == "error"
    assert f"its key {strange} is not trusted" in found["handshake"]["found"]
