"""Invalid engines are refused at registration, and incompatible ones at the handshake."""

import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import torch
from msgspec.structs import replace

from kvbus.engine import Connection, Link, RankMemory, share_tensor
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import BlockTable, lay_out_rank
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import (
    AwaitReady,
    CommitQuery,
    Handshake,
    MakeOffer,
    Register,
    Republished,
    to_body,
)
from tests.process.refused.conftest import code_of
from tests.support.agents import AgentProcess, Agents, until, wait_until
from tests.support.engine_program import EngineConfig, EngineProcess
from tests.support.engines import FULL, SMALL, engine, failure_of, make_spec, rank_link, same
from tests.support.memories import NHD
from tests.support.plain_sockets import Attached, ask, engine_socket

pytestmark = pytest.mark.anyio

NUM_SEGMENTS = 50


async def test_first_process_sets_engine_and_offers_need_all_ranks(prefill: AgentProcess) -> None:
    spec = make_spec(tp=2)
    another = replace(spec, groups=(FULL, SMALL))
    rank, again = (rank_link(prefill.attach, spec, 0)[0] for _ in range(2))
    stranger, _ = rank_link(prefill.attach, another, 0)
    offer = MakeOffer("r", 0, {"full": BlockTable.of([])})
    async with Connection(prefill.attach, spec.engine_id) as control, rank:
        await control.request(Register(engine=spec))
        refusals = [
            await code_of(link.__aenter__())
            for link in (Link(prefill.attach, spec), stranger, again)
        ]
        too_early = await code_of(control.request(offer))
    assert refusals == [ErrorCode.ENGINE_CONFLICT] * 3
    assert too_early is ErrorCode.ENGINE_NOT_READY
    assert prefill.says("request.refused", op="register", code="engine_conflict")


async def test_readers_ask_again_until_engine_republished_its_offers(prefill: AgentProcess) -> None:
    spec, secret = make_spec(), 32 * "5"
    rank, _ = rank_link(prefill.attach, spec, 0)
    shake = Handshake(1, 1, "decode", spec.engine_id, spec, "the instance", "the offer", secret)
    other = replace(shake, offer_id="another")
    query = CommitQuery(secret, secret, "boot", "another", spec.engine_id, "the instance")

    def answers() -> list[str]:
        replies = [ask(prefill.peer, one.op, to_body(one)) for one in (shake, other, query)]
        return [reply.get("error", {"code": "ok"})["code"] for reply in replies]

    async with rank:
        async with Connection(prefill.attach, spec.engine_id) as control:
            register = Register(engine=spec, instance="the instance", republishes=True)
            await control.request(register)
            await control.request(AwaitReady())
            tables = {"full": BlockTable.of([])}
            offer = MakeOffer("r", 0, tables, offer_id="the offer", secret=secret, left_s=5.0)
            await control.request(offer)
            before = await anyio.to_thread.run_sync(answers)
            await control.request(Republished())
            after = await anyio.to_thread.run_sync(answers)
        gone = await anyio.to_thread.run_sync(answers)
    assert before == ["engine_not_ready"] * 3
    assert after == ["ok", "offer_unknown", "ok"]
    assert gone == ["engine_lost", "engine_lost", "ok"]


async def test_fresh_agent_awaits_unknown_engines(fresh: Agents) -> None:
    agents = [fresh.prepare("prefill", engine_wait_s=seconds) for seconds in (600.0, 0.0)]
    fresh.start(*agents)
    spec = make_spec()
    shake = Handshake(1, 1, "decode", spec.engine_id, spec, "instance", "offer", 32 * "5")
    codes = [ask(one.peer, "handshake", to_body(shake))["error"]["code"] for one in agents]
    assert codes == ["engine_not_ready", "offer_unknown"]


async def test_id_of_stopped_engine_is_free_once_named_pid_is_killed(
    prefill: AgentProcess, tmp_path: Path
) -> None:
    spec = make_spec(engine_id=uuid.uuid4().hex)
    config = EngineConfig("prefill", str(prefill.attach), spec, {FULL.name: 4})
    program = EngineProcess(config, tmp_path / "log")
    await program.start()
    try:
        await program.up.wait()
        holder = psutil.Process(prefill.says("engine.attached", engine_id=spec.engine_id)[0]["pid"])
        holder.send_signal(signal.SIGSTOP)
        await until(lambda: holder.status() == psutil.STATUS_STOPPED)
        with pytest.raises(RequestRefused) as refused:
            await Link(prefill.attach, spec).__aenter__()
    finally:
        await program.kill()
    assert refused.value.message.endswith(
        f"is registered by process {holder.pid} (stopped): end it with 'kill -9 {holder.pid}', "
        "or choose another engine_id"
    )
    prefill.says("engine.lost", engine_id=spec.engine_id)
    async with Connection(prefill.attach, spec.engine_id) as control:
        await control.request(Register(engine=spec))


@pytest.mark.parametrize("fault", ["overlap", "outside", "too small"])
async def test_memory_that_contradicts_itself_is_refused(prefill: AgentProcess, fault: str) -> None:
    """`tests/unit/geometry` tests the validation of regions."""
    spec = make_spec()
    rank = lay_out_rank(spec, 0, NHD, num_blocks=4)
    size_bytes = rank.segments[0].size_bytes
    first, second = rank.regions
    starts = {"overlap": first.offset_bytes, "outside": size_bytes}
    moved = replace(second, offset_bytes=starts.get(fault, second.offset_bytes))
    memory = torch.zeros(size_bytes - 4096 * (fault == "too small"), dtype=torch.uint8)
    with share_tensor(memory) as storage:
        wrong = RankMemory(replace(rank, regions=(first, moved)), {"kv": storage})
        link = Link(prefill.attach, spec, memory=wrong, control=False)
        code = await code_of(link.__aenter__())
    assert code is (ErrorCode.INVALID if fault == "too small" else ErrorCode.GEOMETRY)
    assert prefill.says("request.refused", op="register", code=code.value)


def test_a_page_of_words_of_another_size_is_refused(prefill: AgentProcess) -> None:
    with Attached(prefill.attach) as process, SharedSegment(8192) as page:
        process.hello(engine_id="raw", boot=uuid.uuid4().hex)
        body = {"segment_id": "cells", "size_bytes": page.size_bytes, "kind": "cells"}
        reply = process.ask("segment", body, (page.fd,))
    assert reply["error"]["code"] == "segment"
    assert "4096 bytes, not 8192" in reply["error"]["message"]


async def test_incompatible_engines_are_told_field_and_both_values(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    """`tests/unit/planning/test_compatibility.py` compares each field."""
    theirs, ours = make_spec(), make_spec(groups=[replace(FULL, window=32)])
    async with (
        engine(prefill.attach, theirs) as source,
        engine(decode.attach, ours, seed=2) as target,
    ):
        before = target.snapshot()
        offer = await source.prefill.offer("r", num_tokens=16, block_ids=source.some_blocks(5, 16))
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=16, block_ids=target.some_blocks(6, 16)
        )
        failure = await failure_of(fetch)
        await offer.withdraw()

        def is_reported(text: str) -> bool:
            prefill_has, _, decode_has = text.partition("decode has")
            named = "differ in full.window:" in text and "None" in prefill_has
            return named and "32" in decode_has

        assert (failure.code, failure.stage) == (ErrorCode.INCOMPATIBLE, "resolving")
        assert is_reported(failure.message)
        await until(lambda: any(map(is_reported, reasons(prefill, "request.refused"))))
        await until(lambda: any(map(is_reported, reasons(decode, "handshake.refused"))))
        assert same(target.snapshot(), before)


def reasons(agent: AgentProcess, event: str) -> list[str]:
    return [line["reason"] for line in agent.logged(event, code="incompatible")]


def test_an_engine_of_the_other_role_is_refused(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    for agent, other in ((prefill, decode), (decode, prefill)):
        session: dict[str, Any] = {"boot": uuid.uuid4().hex, "secret": uuid.uuid4().hex}
        with Attached(agent.attach) as process:
            process.hello(engine_id="raw", boot=session["boot"])
            endpoint = engine_socket(agent.attach)
            body = to_body(Register(engine=make_spec(engine_id="raw")))
            wrong = ask(endpoint, "register", body | {"role": other.role}, **session, id=1_001)
            right = ask(endpoint, "register", body | {"role": agent.role}, **session, id=1_002)
        assert wrong["error"]["code"] == "config"
        assert wrong["error"]["detail"] == {"agent": agent.role, "engine": other.role}
        assert "ok" in right


class RegisteringRank:
    """A process of many segments, and its rank that registers in a thread."""

    def __init__(self, agent: AgentProcess, threads: ThreadPoolExecutor) -> None:
        self.process, self._agent, self._threads = Attached(agent.attach), agent, threads
        self._boot = uuid.uuid4().hex
        self.process.hello(engine_id="raw", boot=self._boot)
        self.replies = [self.pass_segment(name) for name in ["kv", *map(str, range(NUM_SEGMENTS))]]

    def pass_segment(self, name: str) -> dict[str, Any]:
        fd = os.memfd_create("kvbus-raw")
        os.ftruncate(fd, 1 << 20)
        reply = self.process.ask("segment", {"segment_id": name, "size_bytes": 1 << 20}, (fd,))
        os.close(fd)
        return reply

    def register(self) -> Any:
        spec = make_spec(engine_id="raw")
        body = to_body(Register(engine=spec, rank=lay_out_rank(spec, 0, NHD, num_blocks=4)))
        endpoint = engine_socket(self._agent.attach)
        return self._threads.submit(ask, endpoint, "register", body, boot=self._boot)


def test_segments_passed_while_rank_registers_do_not_harm_agent(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    for agent in (prefill, decode):
        with ThreadPoolExecutor() as threads:
            rank = RegisteringRank(agent, threads)
            reply = rank.register()
            later = [rank.pass_segment(f"later-{number}") for number in range(NUM_SEGMENTS)]
            replies = [*rank.replies, *later, reply.result()]
            rank.process.socket.close()
        assert all("ok" in reply for reply in replies)


def test_engine_ending_while_it_registers_leaves_nothing(prefill: AgentProcess) -> None:
    def registered_bytes() -> float:
        return prefill.metric("registered_bytes")

    wait_until(lambda: not prefill.memory_maps("kvbus-raw"), "those of before are gone")
    wait_until(lambda: not prefill.status()["engines"], "no other engine is there")
    own_bytes = registered_bytes()
    with ThreadPoolExecutor() as threads:
        rank = RegisteringRank(prefill, threads)
        reply = rank.register()
        wait_until(lambda: registered_bytes() > own_bytes or reply.done(), "it registers")
        rank.process.socket.close()
        answered = reply.result()
    wait_until(lambda: registered_bytes() <= own_bytes, "its memory is given back")
    wait_until(lambda: not prefill.memory_maps("kvbus-raw"), "its memory is unmapped")
    assert answered.keys() & {"ok", "error"}
    assert prefill.status()["engines"] == {}
