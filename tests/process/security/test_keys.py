"""Agents with keys: the rights of each role, and of revoked keys."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.errors import ErrorCode
from kvbus.protocol import REQUESTS, Outcome, Role, Socket, Ticket
from tests.process.security.conftest import signed
from tests.support.agents import AgentProcess, Agents, agents_ended, until, wait_until
from tests.support.engines import (
    NOTHING,
    begin,
    engine,
    failure_of,
    hand_over_once,
    pair,
    spread_engine,
    works,
)
from tests.support.keyring import KeyRing
from tests.support.plain_sockets import Curve, apply, ask, plain_socket

pytestmark = pytest.mark.anyio

OPS = {"prefill": set(REQUESTS[Socket.PREFILL_PEER]), "decode": set(REQUESTS[Socket.DECODE_PEER])}
ALLOWED = {
    Role.PREFILL: {"status", "trace"},
    Role.DECODE: OPS["prefill"] | OPS["decode"],
    Role.ROUTER: {"cost", "withdraw", "status", "trace"},
    Role.OBSERVER: {"cost", "status", "trace"},
}
HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


@pytest.fixture
def prefill(site: list[AgentProcess]) -> AgentProcess:
    return site[0]


@pytest.fixture
def decode(site: list[AgentProcess]) -> AgentProcess:
    return site[1]


def is_let_in(curve: Curve | None, endpoint: str, kind: int = zmq.DEALER) -> bool:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.set(zmq.LINGER, 0)
        apply(socket, curve)
        with socket.get_monitor_socket(HANDSHAKE_EVENTS) as monitor:
            socket.connect(endpoint)
            assert monitor.poll(30_000)
            event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
            socket.disable_monitor()
    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def envelope(op: str, request_id: int) -> dict[str, Any]:
    return {"v": 1, "op": op, "id": request_id, "boot": "leaver", "body": {}}


def trust(ring: KeyRing, name: str, role: Role, *, by: AgentProcess) -> None:
    by.skip_log()
    ring.trust(name, role)
    by.says("keys.changed")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_each_role_is_forbidden_what_its_row_does_not_name(
    ring: KeyRing, site: list[AgentProcess], side: str
) -> None:
    """Permitted requests are refused for their empty body."""
    agent = site[side == "decode"]
    for role in Role:
        curve, may = ring.curve(f"any-{role}", side), ALLOWED[role] & OPS[side]
        replies = {op: ask(agent.peer, op, {}, curve=curve) for op in OPS[side]}
        codes = {op: reply.get("error", {}).get("code") for op, reply in replies.items()}
        assert {op for op, code in codes.items() if code == "forbidden"} == OPS[side] - may
        assert {codes[op] for op in may} <= {"invalid", None}


def test_missing_or_wrong_key_is_refused_at_handshake_and_logged(
    ring: KeyRing, prefill: AgentProcess
) -> None:
    stranger, before = ring.curve("stranger", "prefill"), prefill.metric("refused_keys")
    peer, events = prefill.peer, prefill.started["events"]
    for socket, kind in (("peer", zmq.DEALER), ("events", zmq.SUB)):
        assert not is_let_in(stranger, prefill.started[socket], kind)
        assert prefill.says("key.refused", key=stranger.public, socket=socket, address="127.0.0.1")
        assert not is_let_in(None, prefill.started[socket], kind)
    assert prefill.metric("refused_keys") == before + 2
    assert is_let_in(ring.curve("any-prefill", "prefill"), peer)
    assert not is_let_in(ring.curve("any-prefill", "prefill"), events, zmq.SUB)
    assert is_let_in(ring.curve("any-router", "prefill"), events, zmq.SUB)


async def test_decode_agent_connects_only_to_trusted_prefill_keys(
    ring: KeyRing, prefill: AgentProcess, decode: AgentProcess
) -> None:
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING)
        ticket = Ticket.from_json(offer.ticket)
        for key in ("", "any-decode", "stranger"):
            server_key = ring.pair(key).public if key else ""
            named = signed(ticket, server_key=server_key).to_json()
            failure = await failure_of(target.decode.fetch(named, **NOTHING))
            assert failure.code is ErrorCode.FORBIDDEN
            assert "not trusted here with the role 'prefill'" in failure.message
        assert await works(source, target)
        assert ticket.server_key == ring.pair("prefill").public
        await offer.withdraw()


async def test_lease_belongs_to_acquiring_key_though_other_knows_token(
    ring: KeyRing, prefill: AgentProcess
) -> None:
    owner, other = (ring.curve(name, "prefill") for name in ("any-decode", "decode"))
    async with engine(prefill.attach) as source:
        offer = await source.prefill.offer("r", num_tokens=32, block_ids=source.some_blocks(1, 32))
        named = {key: offer.ticket[key] for key in ("agent_boot", "offer_id")}
        acquire = {**named, "secret": offer.ticket["secret"], "reader_id": "r", "lease_s": 20.0}
        granted = ask(prefill.peer, "acquire", acquire, curve=owner)["ok"]
        lease = {**named, "epoch": granted["epoch"], "token": granted["token"]}
        renew, release = {**lease, "lease_s": 20.0}, {**lease, "code": "cancelled"}
        refused = [
            ask(prefill.peer, op, body, curve=other)["error"]["code"]
            for op, body in (("renew", renew), ("release", release))
        ]
        renewed = ask(prefill.peer, "renew", renew, curve=owner)
        released = ask(prefill.peer, "release", release, curve=owner)
        await offer.withdraw()
    assert refused == ["forbidden"] * 2
    assert renewed["ok"]["epoch"] == granted["epoch"]
    assert released["ok"] == {}


def test_key_in_use_loses_role_by_edit_and_all_rights_by_removal(
    ring: KeyRing, prefill: AgentProcess
) -> None:
    trust(ring, "leaver", Role.DECODE, by=prefill)
    curve, file = ring.curve("leaver", "prefill"), ring.trusted
    with plain_socket(prefill.peer, curve) as dealer:

        def codes(request_id: int) -> list[str]:
            """Codes of an empty acquire and of a status request."""
            told = []
            for op in ("acquire", "status"):
                dealer.send(msgpack.packb(envelope(op, request_id)))
                told.append(msgpack.unpackb(dealer.recv()).get("error", {"code": "ok"})["code"])
                request_id += 1
            return told

        as_reader = codes(1)
        prefill.skip_log()
        with file.open("r+") as opened:
            text = opened.read().replace("leaver  decode", "leaver  router")
            opened.seek(0)
            opened.write(text)
        prefill.says("keys.changed", num_lost=1)
        as_router = codes(3)
        prefill.skip_log()
        ring.revoke("leaver")
        prefill.says("keys.changed", num_lost=1)
        as_stranger = codes(5)
    assert (as_reader, as_router) == (["invalid", "ok"], ["forbidden", "ok"])
    assert as_stranger == ["forbidden", "forbidden"]
    assert not is_let_in(curve, prefill.peer)


def test_agent_answers_while_key_file_cannot_be_read(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    pipe = ring.folder / "slow"
    with agents_ended(Agents) as agents:
        agent = ring.prepare(agents, Role.PREFILL, "prefill")
        agents.start(agent)
        with plain_socket(agent.peer, agent.curve) as dealer:
            dealer.send(msgpack.packb(envelope("status", 1)))
            dealer.recv()
            os.mkfifo(pipe, 0o644)
            pipe.replace(ring.trusted)
            with opened_by_reader(ring.trusted):
                dealer.send(msgpack.packb(envelope("status", 2)))
                answered = dealer.poll(30_000)
        assert answered
        assert agent.says("keys.changed")


@contextmanager
def opened_by_reader(pipe: Path) -> Iterator[None]:
    ends: list[int] = []

    def opened() -> bool:
        with suppress(OSError):  # no reader yet
            ends.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(ends)

    wait_until(opened, "somebody opens the pipe")
    try:
        yield
    finally:
        os.close(*ends)


def test_events_stop_for_a_revoked_key_and_go_on_for_others(
    ring: KeyRing, prefill: AgentProcess
) -> None:
    trust(ring, "listener", Role.OBSERVER, by=prefill)
    with ExitStack() as stack:
        listener, observer = (
            stack.enter_context(
                plain_socket(prefill.started["events"], ring.curve(name, "prefill"), kind=zmq.SUB)
            )
            for name in ("listener", "any-observer")
        )
        for sub in (listener, observer):
            sub.recv_multipart()
        prefill.skip_log()
        ring.revoke("listener")
        key = ring.pair("listener").public
        prefill.says("key.refused", key=key, socket="events")
        for sub in (listener, observer):
            while sub.poll(0):
                sub.recv_multipart()
        for _ in range(3):
            observer.recv_multipart()
        assert not listener.poll(0)


async def test_agents_restart_with_another_key_and_without_trust(tmp_path: Path) -> None:
    """No lease is renewed in time: events alone tell the fetch that the offer grew."""
    ring = KeyRing(tmp_path)
    with agents_ended(Agents) as agents:
        old = ring.prepare(agents, Role.PREFILL, "old")
        binds = {key: old.settings[key] for key in ("peer_bind", "events_bind")}
        new = ring.prepare(agents, Role.PREFILL, "new", max_lease_s=600.0, **binds)
        decode = ring.prepare(agents, Role.DECODE, "decode", lease_s=600.0)
        agents.start(old, decode)
        await hand_over_once(old, decode)
        old.kill()
        agents.start(new)
        async with pair(new.attach, decode.attach) as (source, target):
            assert await works(source, target)
            ring.revoke("old")
            await until(lambda: decode.logged("peer.distrusted"))
            handoff = await begin(source, target, ready=16)
            await until(lambda: new.status()["counts"]["leases"] == 1)
            await handoff.seal()
            await handoff.completed()
        new.kill()
        ring.revoke("decode")
        new.start()
        async with pair(new.attach, decode.attach) as (source, target):
            refused = await begin(source, target)
            failure = await failure_of(refused.fetch)
            await refused.offer.withdraw()
            await refused.offer.ended
    assert failure.code is ErrorCode.FORBIDDEN
    assert "refused our key" in failure.message


async def test_ranks_at_other_agents_are_read_if_keys_are_trusted(tmp_path: Path) -> None:
    """Two agents on each side: the readers meet both sources, and one reader asks the other."""
    ring = KeyRing(tmp_path)
    with agents_ended(Agents) as agents:
        for number, role in enumerate((Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)):
            ring.prepare(agents, role, f"agent-{number}")
        agents.start(*agents.all)
        async with (
            spread_engine(agents.all[:2], seed=1) as source,
            spread_engine(agents.all[2:], seed=2) as target,
        ):
            assert await works(source, target)
            ring.revoke("agent-3")
            await until(lambda: all(a.logged("keys.changed", num_lost=1) for a in agents.all))
            refused = await begin(source, target)
            failure = await failure_of(refused.fetch)
            await refused.offer.withdraw()
            await refused.offer.ended
    assert failure.code is ErrorCode.FORBIDDEN
    assert "with the role 'decode'" in failure.message


def kvbus(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_commands_ask_agents_with_the_keys_of_their_options(
    ring: KeyRing, prefill: AgentProcess, decode: AgentProcess
) -> None:
    ring.pair("stranger")
    secret, stranger = (str(ring.secret_path(name)) for name in ("any-observer", "stranger"))
    keys = [f"--server-key={ring.pair(name).public}" for name in ("prefill", "decode")]
    status = ("status", prefill.peer)
    trace = ("trace", "never", "--peer", prefill.peer, "--peer", decode.peer, "--key-file", secret)
    wrong = [
        (status, 1, "uses keys: give a key of our own and its server key"),
        ((*status, "--key-file", secret), 2, "--server-key: needed as well"),
        ((*status, "--key-file", stranger, keys[0]), 1, "refused our key"),
        ((*trace, keys[0]), 2, "given 1 times for 2 agents"),
    ]
    told = kvbus(*status, "--key-file", secret, keys[0], "--json")
    traced = kvbus(*trace, *keys)
    assert json.loads(told.stdout)["agent_id"] == prefill.settings["agent_id"]
    assert all(agent.settings["agent_id"] in traced.stderr for agent in (prefill, decode))
    assert "warning" not in traced.stderr
    for arguments, exit_code, said in wrong:
        refused = kvbus(*arguments)
        assert (refused.exit_code, said in refused.stderr) == (exit_code, True)


async def test_a_revoked_reader_of_this_machine_takes_no_offer(
    fresh: Agents, tmp_path: Path
) -> None:
    ring = KeyRing(tmp_path)
    prefill = ring.prepare(fresh, Role.PREFILL, "prefill", mapped=True)
    revoked, other = (
        ring.prepare(fresh, Role.DECODE, name, mapped=True) for name in ("revoked", "other")
    )
    prefill.expected_trouble.add("cells.closed")
    fresh.start(prefill, revoked, other)
    async with (
        pair(prefill.attach, revoked.attach) as (source, target),
        engine(other.attach) as another,
    ):
        assert await works(source, target)
        assert await works(source, another)
        assert prefill.metric("memory_readers") == 2
        ring.revoke("revoked")
        await until(lambda: prefill.metric("memory_readers") == 1)
        handoff = await begin(source, target)
        failure = await failure_of(handoff.fetch)
        await handoff.offer.withdraw()
        outcome = await handoff.offer.ended
        assert failure.code is ErrorCode.FORBIDDEN
        assert outcome is Outcome.WITHDRAWN
        assert await works(source, another)
