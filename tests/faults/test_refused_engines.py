"""An engine that cannot be registered, or cannot exchange KV with another, is told why."""

from dataclasses import dataclass
from functools import partial

import msgspec
import pytest
import torch

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import EngineSpec, lay_out_rank
from kvbus.memory import share_tensor
from tests.agents import until
from tests.engines import FULL, NHD, SMALL, engine, failure_of, make_spec, pair, works

pytestmark = pytest.mark.anyio


async def test_a_second_engine_under_the_same_id_is_refused(prefill):
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


async def test_processes_of_one_engine_that_disagree_about_it_are_refused(prefill):
    spec = make_spec(tp=2)
    other = make_spec(tp=2, groups=(FULL, SMALL), engine_id=spec.engine_id)
    async with (
        PrefillSession(prefill.attach, spec) as control,
        MemorySession(prefill.attach, other, 0) as memory,
    ):
        await control.register()
        with pytest.raises(RequestRefused) as refused:
            await memory.allocate(NHD, num_blocks=4)

    assert refused.value.code is ErrorCode.ENGINE_CONFLICT


async def test_an_engine_without_all_of_its_ranks_offers_nothing(prefill):
    spec = make_spec(tp=2)
    async with (
        PrefillSession(prefill.attach, spec) as control,
        MemorySession(prefill.attach, spec, 0) as memory,
    ):
        await control.register()
        await memory.allocate(NHD, num_blocks=4)
        with pytest.raises(RequestRefused) as refused:
            await control.offer("r", num_tokens=0, block_ids={"full": []})

    assert refused.value.code is ErrorCode.ENGINE_NOT_READY


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("overlap", ErrorCode.GEOMETRY),
        ("outside", ErrorCode.GEOMETRY),
        ("too small", ErrorCode.INVALID),
    ],
)
async def test_memory_that_contradicts_itself_is_refused(prefill, fault, code):
    spec = make_spec()
    rank = lay_out_rank(spec, 0, NHD, num_blocks=4)
    size_bytes = rank.segments[0].size_bytes
    first, second = rank.regions
    moved_to = {"overlap": first.offset_bytes, "outside": size_bytes}
    offset_bytes = moved_to.get(fault, second.offset_bytes)
    wrong = msgspec.structs.replace(
        rank, regions=(first, msgspec.structs.replace(second, offset_bytes=offset_bytes))
    )
    memory = torch.zeros(size_bytes - 4096 * (fault == "too small"), dtype=torch.uint8)
    with share_tensor(memory) as storage:
        async with MemorySession(prefill.attach, spec, 0) as session:
            with pytest.raises(RequestRefused) as refused:
                await session.register(wrong, {"kv": storage})

    assert refused.value.code is code
    assert prefill.says("request.refused", op="register", code=code.value)


@dataclass(frozen=True)
class Misfit:
    """Two engines that differ in one field."""

    prefill: EngineSpec
    decode: EngineSpec
    field: str
    values: tuple[str, str]


MISFITS = {
    "model": Misfit(make_spec(model="a"), make_spec(model="b"), "model", ("a", "b")),
    "dtype": Misfit(
        make_spec(),
        make_spec(groups=(msgspec.structs.replace(FULL, dtype="float16"),)),
        "full.dtype",
        ("bfloat16", "float16"),
    ),
    "head_dim": Misfit(
        make_spec(),
        make_spec(groups=(msgspec.structs.replace(FULL, head_dim=16),)),
        "full.head_dim",
        ("8", "16"),
    ),
}


@pytest.mark.parametrize("name", MISFITS)
async def test_engines_that_do_not_fit_are_refused_with_the_field_and_both_values(
    prefill, decode, name
):
    misfit = MISFITS[name]
    async with (
        engine(PrefillSession, prefill.attach, misfit.prefill) as source,
        engine(DecodeSession, decode.attach, misfit.decode) as target,
    ):
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [1]})
        failure = await failure_of(fetch)

        def is_named(text: str) -> bool:
            return all(word in text for word in (misfit.field, *misfit.values))

        assert failure.code is ErrorCode.INCOMPATIBLE
        assert is_named(failure.message)
        for agent, event in ((prefill, "request.refused"), (decode, "handshake.refused")):
            lines = partial(agent.logged, event, code="incompatible")
            await until(lambda lines=lines: any(is_named(one["reason"]) for one in lines()))
        await offer.withdraw()


async def test_after_all_of_that_a_handoff_works(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
