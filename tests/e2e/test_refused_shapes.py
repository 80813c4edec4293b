"""What would give wrong tokens is refused at once, with a name, before any byte moves."""

import msgspec
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, state_group
from tests.e2e.shapes import GROUP, PATHS, Side, two_engines
from tests.engines import engine, failure_of, make_spec, same

pytestmark = pytest.mark.anyio

WINDOW = GroupSpec("window", (2, 3), 8, 8, 4, "bfloat16", window=21)
STATE = state_group("state", (2,), (StatePart("conv", 6, 10),))


def with_field(**fields: object) -> EngineSpec:
    """An engine whose one group differs from the others' in a field."""
    return make_spec(groups=[msgspec.structs.replace(GROUP, **fields)])


MISFITS = {
    "model": (make_spec(model="a", groups=[GROUP]), make_spec(model="b", groups=[GROUP]), "a", "b"),
    "full.dtype": (with_field(), with_field(dtype="float16"), "bfloat16", "float16"),
    "full.num_kv_heads": (with_field(), with_field(num_kv_heads=4), "8", "4"),
    "full.head_dim": (with_field(), with_field(head_dim=16), "4", "16"),
    "full.layers": (with_field(), with_field(layers=(0, 1, 2)), "0,1", "0,1,2"),
    "full.parts": (with_field(), with_field(parts=("latent",)), "k,v", "latent"),
    "full.window": (with_field(), with_field(window=32), "None", "32"),
    "groups": (
        make_spec(groups=[GROUP]),
        make_spec(groups=[GROUP, WINDOW]),
        "full",
        "full,window",
    ),
    "state.state": (
        make_spec(groups=[GROUP, STATE]),
        make_spec(groups=[GROUP, state_group("state", (2,), (StatePart("conv", 6, 12),))]),
        "unit_bytes=10",
        "unit_bytes=12",
    ),
}


@pytest.mark.parametrize("field", MISFITS)
async def test_engines_that_do_not_fit_are_told_the_field_and_both_values(shapes, field):
    theirs, ours, their_value, our_value = MISFITS[field]
    reader = shapes.decode["auto"]
    async with (
        engine(PrefillSession, shapes.prefill.attach, theirs) as source,
        engine(DecodeSession, reader.attach, ours, seed=2) as target,
    ):
        before = target.snapshot()
        offer = await source.prefill.offer("r", num_tokens=16, block_ids=source.some_blocks(5, 16))
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=16, block_ids=target.some_blocks(6, 16)
        )
        failure = await failure_of(fetch)
        await offer.withdraw()
        refused = shapes.prefill.says("request.refused", op="handshake", code="incompatible")
        noticed = reader.says("handshake.refused", engine_id=theirs.engine_id)

        assert failure.code is ErrorCode.INCOMPATIBLE
        assert failure.stage == "resolving"
        for text in (failure.message, refused[-1]["reason"], noticed[-1]["reason"]):
            assert f"differ in {field}:" in text
            assert (
                f"prefill has {their_value}" in text or their_value in text.split("decode has")[0]
            )
            assert our_value in text.split("decode has")[1]
        assert same(target.snapshot(), before)


CONTRADICTIONS = {
    "a layer in two groups": [GROUP, msgspec.structs.replace(WINDOW, layers=(1, 2))],
    "two groups of one name": [GROUP, msgspec.structs.replace(WINDOW, name="full")],
    "an unknown dtype": [msgspec.structs.replace(GROUP, dtype="int3")],
    "a part twice": [msgspec.structs.replace(GROUP, parts=("k", "k"))],
    "a state in blocks": [msgspec.structs.replace(STATE, block_size=16)],
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
async def test_an_engine_that_contradicts_itself_is_refused_when_it_registers(shapes, name):
    spec = make_spec(groups=CONTRADICTIONS[name])
    async with PrefillSession(shapes.prefill.attach, spec) as session:
        with pytest.raises(RequestRefused) as refused:
            await session.register()

    assert refused.value.code is ErrorCode.GEOMETRY


@pytest.mark.parametrize("path", PATHS)
async def test_offered_blocks_that_the_engine_does_not_have_are_refused(shapes, path):
    async with two_engines(shapes, path, Side(), Side(tp=2)) as (source, target):
        before = target.snapshot()
        refusals = []
        for block_ids in ([1, 9999], [1, 1], [1]):
            with pytest.raises(RequestRefused) as refused:
                await source.prefill.offer("r", num_tokens=30, block_ids={"full": block_ids})
            refusals.append(refused.value.code)

        assert refusals == [ErrorCode.GEOMETRY] * 3
        assert same(target.snapshot(), before)


@pytest.mark.parametrize("path", PATHS)
async def test_wanted_blocks_that_the_engine_does_not_have_are_refused(shapes, path):
    async with two_engines(shapes, path, Side(), Side(tp=2)) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer("r", num_tokens=30, block_ids={"full": [1, 2]})
        for block_ids in ([1, 9999], [1, 1], [1], [1, 2, 3]):
            fetch = target.decode.fetch(offer.ticket, num_tokens=30, block_ids={"full": block_ids})
            failure = await failure_of(fetch)

            assert failure.code is ErrorCode.GEOMETRY
            assert failure.blocks_free
        await offer.withdraw()
        assert same(target.snapshot(), before)


@pytest.mark.parametrize("path", PATHS)
async def test_tokens_that_a_sealed_offer_does_not_have_are_refused(shapes, path):
    async with two_engines(shapes, path, Side(), Side(tp=2)) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer("r", num_tokens=30, block_ids={"full": [1, 2]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=31, block_ids={"full": [3, 4]})
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert "30" in failure.message
        assert "31" in failure.message
        assert same(target.snapshot(), before)


async def test_a_window_of_which_an_offer_keeps_too_little_is_refused(shapes):
    groups = (GROUP, WINDOW)
    async with two_engines(shapes, "auto", Side(), Side(), groups=groups) as (source, _):
        with pytest.raises(RequestRefused, match="window of 21 tokens") as refused:
            await source.prefill.offer(
                "r",
                num_tokens=60,
                block_ids={"full": [1, 2, 3, 4], "window": [5]},
                first_blocks={"window": 7},
            )

        assert refused.value.code is ErrorCode.GEOMETRY


@pytest.mark.parametrize("path", PATHS)
async def test_a_window_that_starts_before_what_the_offer_kept_is_refused(shapes, path):
    groups = (GROUP, WINDOW)
    async with two_engines(shapes, path, Side(), Side(tp=2), groups=groups) as (source, target):
        before = target.snapshot()
        offer = await source.prefill.offer(
            "r",
            num_tokens=60,
            block_ids=source.some_blocks(5, 60),
            first_blocks=source.first_blocks(60),
        )
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=40, block_ids=target.some_blocks(6, 40)
        )
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert failure.code is ErrorCode.GEOMETRY
        assert "window" in failure.message
        assert same(target.snapshot(), before)
