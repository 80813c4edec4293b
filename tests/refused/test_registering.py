"""Engines that cannot be are refused when they register, those that do not fit when they meet."""

import os
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import EngineSpec, GroupSpec, KvPart, StatePart, lay_out_rank, state_group
from kvbus.memory import share_tensor
from kvbus.protocol import Register, to_body
from tests.agents import AgentProcess, until, wait_until
from tests.engines import FULL, SMALL, engine, failure_of, make_spec, same
from tests.memories import NHD
from tests.plain_sockets import Attached, ask, engine_socket

pytestmark = pytest.mark.anyio

WINDOW = GroupSpec("window", (2, 3), 8, 8, 4, "bfloat16", window=21)
STATE = state_group("state", (2,), (StatePart("conv", 6, 10),))
NUM_SEGMENTS = 51


async def test_a_second_engine_under_the_same_id_is_refused(prefill: AgentProcess) -> None:
    async with (
        engine(PrefillSession, prefill.attach) as source,
        PrefillSession(prefill.attach, source.spec) as control,
        MemorySession(prefill.attach, source.spec, 0) as memory,
    ):
        refusals = []
        for register in (control.register(), memory.allocate(NHD, num_blocks=4)):
            with pytest.raises(RequestRefused) as refused:
                await register
            refusals.append(refused.value.code)

    assert refusals == [ErrorCode.ENGINE_CONFLICT] * 2
    assert prefill.says("request.refused", op="register", code="engine_conflict")


async def test_an_engine_is_what_its_first_process_said_and_offers_with_all_of_its_ranks(
    prefill: AgentProcess,
) -> None:
    spec = make_spec(tp=2)
    other = replace(spec, groups=(FULL, SMALL))
    async with (
        PrefillSession(prefill.attach, spec) as control,
        MemorySession(prefill.attach, other, 0) as stranger,
        MemorySession(prefill.attach, spec, 0) as memory,
    ):
        await control.register()
        with pytest.raises(RequestRefused) as disagrees:
            await stranger.allocate(NHD, num_blocks=4)
        await memory.allocate(NHD, num_blocks=4)
        with pytest.raises(RequestRefused) as too_early:
            await control.offer("r", num_tokens=0, block_ids={"full": []})

    assert disagrees.value.code is ErrorCode.ENGINE_CONFLICT
    assert too_early.value.code is ErrorCode.ENGINE_NOT_READY


@pytest.mark.parametrize(
    "groups",
    [
        [FULL, replace(WINDOW, layers=(1, 2))],
        [FULL, replace(WINDOW, name="full")],
        [replace(FULL, dtype="int3")],
        [replace(FULL, parts=(KvPart.KEY, KvPart.KEY))],
        [replace(STATE, block_size=16)],
    ],
    ids=["a layer in two groups", "two of one name", "no dtype", "a part twice", "state in blocks"],
)
async def test_an_engine_that_contradicts_itself_is_refused(
    prefill: AgentProcess, groups: Sequence[GroupSpec]
) -> None:
    async with PrefillSession(prefill.attach, make_spec(groups=groups)) as session:
        with pytest.raises(RequestRefused) as refused:
            await session.register()

    assert refused.value.code is ErrorCode.GEOMETRY


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("overlap", ErrorCode.GEOMETRY),
        ("outside", ErrorCode.GEOMETRY),
        ("too small", ErrorCode.INVALID),
    ],
)
async def test_memory_that_contradicts_itself_is_refused(
    prefill: AgentProcess, fault: str, code: ErrorCode
) -> None:
    spec = make_spec()
    rank = lay_out_rank(spec, 0, NHD, num_blocks=4)
    size_bytes = rank.segments[0].size_bytes
    first, second = rank.regions
    moved_to = {"overlap": first.offset_bytes, "outside": size_bytes}
    moved = replace(second, offset_bytes=moved_to.get(fault, second.offset_bytes))
    memory = torch.zeros(size_bytes - 4096 * (fault == "too small"), dtype=torch.uint8)
    with share_tensor(memory) as storage:
        async with MemorySession(prefill.attach, spec, 0) as session:
            with pytest.raises(RequestRefused) as refused:
                await session.register(replace(rank, regions=(first, moved)), {"kv": storage})

    assert refused.value.code is code
    assert prefill.says("request.refused", op="register", code=code.value)


def with_field(**fields: Any) -> EngineSpec:
    """An engine whose one group differs from the others' in a field."""
    return make_spec(groups=[msgspec.structs.replace(FULL, **fields)])


MISFITS = {
    "model": (make_spec(model="a"), make_spec(model="b"), "a", "b"),
    "full.dtype": (with_field(), with_field(dtype="float16"), "bfloat16", "float16"),
    "full.num_kv_heads": (with_field(), with_field(num_kv_heads=4), "6", "4"),
    "full.head_dim": (with_field(), with_field(head_dim=16), "8", "16"),
    "full.layers": (with_field(), with_field(layers=(0, 1, 2)), "0,1", "0,1,2"),
    "full.parts": (with_field(), with_field(parts=("latent",)), "k,v", "latent"),
    "full.window": (with_field(), with_field(window=32), "None", "32"),
    "groups": (make_spec(), make_spec(groups=[FULL, WINDOW]), "full", "full,window"),
    "state.state": (
        make_spec(groups=[FULL, STATE]),
        make_spec(groups=[FULL, state_group("state", (2,), (StatePart("conv", 6, 12),))]),
        "unit_bytes=10",
        "unit_bytes=12",
    ),
}


@pytest.mark.parametrize("field", MISFITS)
async def test_engines_that_do_not_fit_are_told_the_field_and_both_values(
    prefill: AgentProcess, decode: AgentProcess, field: str
) -> None:
    theirs, ours, their_value, our_value = MISFITS[field]
    async with (
        engine(PrefillSession, prefill.attach, theirs) as source,
        engine(DecodeSession, decode.attach, ours, seed=2) as target,
    ):
        before = target.snapshot()
        offer = await source.prefill.offer("r", num_tokens=16, block_ids=source.some_blocks(5, 16))
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=16, block_ids=target.some_blocks(6, 16)
        )
        failure = await failure_of(fetch)
        await offer.withdraw()

        def is_told(text: str) -> bool:
            prefill_has, _, decode_has = text.partition("decode has")
            named = f"differ in {field}:" in text and their_value in prefill_has
            return named and our_value in decode_has

        assert (failure.code, failure.stage) == (ErrorCode.INCOMPATIBLE, "resolving")
        assert is_told(failure.message)
        await until(lambda: any(map(is_told, reasons(prefill, "request.refused"))))
        await until(lambda: any(map(is_told, reasons(decode, "handshake.refused"))))
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

    def pass_segments(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The replies to a small segment for each name."""
        replies = []
        for name in names:
            fd = os.memfd_create("kvbus-raw")
            os.ftruncate(fd, 1 << 20)
            segment = {"segment_id": name, "size_bytes": 1 << 20}
            replies.append(self.process.ask("segment", segment, (fd,)))
            os.close(fd)
        return replies

    def register(self) -> Any:
        """The reply to come."""
        spec = make_spec(engine_id="raw")
        body = to_body(Register(engine=spec, rank=lay_out_rank(spec, 0, NHD, num_blocks=4)))
        endpoint = engine_socket(self._agent.attach)
        return self._threads.submit(ask, endpoint, "register", body, boot=self._boot)


NAMES = ["kv", *map(str, range(2 * NUM_SEGMENTS))]


def test_segments_passed_while_a_rank_registers_do_not_harm_the_agent(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    for agent in (prefill, decode):
        with ThreadPoolExecutor() as threads:
            rank = RegisteringRank(agent, threads)
            rank.pass_segments(NAMES[:NUM_SEGMENTS])

            reply = rank.register()
            replies = [*rank.pass_segments(NAMES[NUM_SEGMENTS:]), reply.result()]
            rank.process.socket.close()

        assert all("ok" in reply for reply in replies)


def test_an_engine_that_ends_while_it_registers_leaves_nothing_behind(
    prefill: AgentProcess,
) -> None:
    def registered_bytes() -> float:
        return prefill.metric("registered_bytes")

    wait_until(lambda: not prefill.memory_maps("kvbus-raw"), "those of before are gone")
    wait_until(lambda: not prefill.status()["engines"], "no other engine is there")
    own_bytes = registered_bytes()
    with ThreadPoolExecutor() as threads:
        rank = RegisteringRank(prefill, threads)
        rank.pass_segments(NAMES[:NUM_SEGMENTS])
        reply = rank.register()
        wait_until(lambda: registered_bytes() > own_bytes or reply.done(), "it registers")
        rank.process.socket.close()
        answered = reply.result()
    wait_until(lambda: registered_bytes() <= own_bytes, "its memory is given back")
    wait_until(lambda: not prefill.memory_maps("kvbus-raw"), "its memory is unmapped")

    assert answered.keys() & {"ok", "error"}
    assert prefill.status()["engines"] == {}
