"""Engines that differ are refused by the field and both values; caches of other sizes are not."""

import msgspec
import pytest

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import (
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    KvPart,
    RankSpec,
    Region,
    Segment,
)
from kvbus.planning import check_compatible

replace = msgspec.structs.replace
PARTS = (KvPart.KEY, KvPart.VALUE)
GROUP = GroupSpec("full", (0, 1), 4, 2, 8, "float16", PARTS, 128)
ENGINE = EngineSpec("prefill", "llama@1", 1, (GROUP,))


def rank_of(
    *, num_blocks: int = 4, padding: int = 0, head_first: bool = False, number: int = 0
) -> RankSpec:
    """A rank of `ENGINE`: one tensor of two layers, K and V outside of the tokens."""
    token, head = (16, 64) if head_first else (32, 16)
    axes = (
        Axis(AxisName.LAYER, 2, num_blocks * (256 + padding)),
        Axis(AxisName.BLOCK, num_blocks, 256 + padding),
        Axis(AxisName.KV, 2, 128),
        Axis(AxisName.TOKEN, 4, token),
        Axis(AxisName.HEAD, 2, head),
        Axis(AxisName.DIM, 8, 2),
    )
    region = Region("kv", 0, "full", (0, 1), PARTS, 0, 2, axes)
    return RankSpec(number, (Segment("kv", 1 << 20),), (region,))


def with_group(**changes: object) -> EngineSpec:
    return replace(ENGINE, groups=(replace(GROUP, **changes),))


ENGINE_CASES: dict[str, tuple[EngineSpec, str, str]] = {
    "model": (replace(ENGINE, model="llama@2"), "llama@1", "llama@2"),
    "tp_size": (replace(ENGINE, tp_size=2), "1", "2"),
    "groups": (with_group(name="sliding"), "full", "sliding"),
    "full.layers": (with_group(layers=(1, 0)), "0,1", "1,0"),
    "full.dtype": (with_group(dtype="bfloat16"), "float16", "bfloat16"),
    "full.num_kv_heads": (with_group(num_kv_heads=4), "2", "4"),
    "full.head_dim": (with_group(head_dim=16), "8", "16"),
    "full.parts": (with_group(parts=(KvPart.LATENT,)), "k,v", "latent"),
    "full.window": (with_group(window=None), "128", "None"),
    "full.block_size": (with_group(block_size=8), "4", "8"),
}


@pytest.mark.parametrize("field", ENGINE_CASES)
def test_a_field_of_the_engine_that_differs_is_refused_with_both_values(field: str) -> None:
    other, ours, theirs = ENGINE_CASES[field]

    with pytest.raises(GeometryError) as refused:
        check_compatible(ENGINE, (rank_of(),), other, (rank_of(),))

    assert refused.value.code is ErrorCode.INCOMPATIBLE
    assert refused.value.detail == {"field": field, "prefill": ours, "decode": theirs}
    assert field in refused.value.message
    assert ours in refused.value.message
    assert theirs in refused.value.message


def test_every_field_of_a_group_is_compared() -> None:
    compared = {field.partition(".")[2] for field in ENGINE_CASES} - {""}

    assert compared | {"name"} == set(GroupSpec.__struct_fields__)


def test_a_missing_rank_is_refused() -> None:
    with pytest.raises(GeometryError) as refused:
        check_compatible(ENGINE, (rank_of(),), ENGINE, (rank_of(), rank_of(number=1)))

    assert refused.value.detail == {"field": "ranks", "prefill": "0", "decode": "0,1"}


LAYOUTS: dict[str, RankSpec] = {
    "axis_order": rank_of(head_first=True),
    "first_head": replace(rank_of(), regions=(replace(rank_of().regions[0], first_head=1),)),
    "two_regions": replace(rank_of(), regions=2 * rank_of().regions),
}


@pytest.mark.parametrize("other", LAYOUTS.values(), ids=LAYOUTS)
def test_another_layout_is_refused_with_both_layouts(other: RankSpec) -> None:
    with pytest.raises(GeometryError) as refused:
        check_compatible(ENGINE, (rank_of(),), ENGINE, (other,))

    detail = refused.value.detail
    assert refused.value.code is ErrorCode.INCOMPATIBLE
    assert detail["field"] == "full.layout of rank 0"
    assert detail["prefill"] == "1x[layer:2,block,kv:2,token:4,head:2,dim:8]@0"
    assert detail["decode"] != detail["prefill"]


@pytest.mark.parametrize(
    "other",
    [rank_of(), rank_of(num_blocks=9), rank_of(padding=64), rank_of(num_blocks=2, padding=2)],
    ids=["equal", "more_blocks", "padded_blocks", "fewer_and_padded"],
)
def test_equal_engines_pass_however_many_blocks_and_whatever_padding(other: RankSpec) -> None:
    check_compatible(ENGINE, (rank_of(),), replace(ENGINE, engine_id="decode"), (other,))
    check_compatible(ENGINE, (other,), replace(ENGINE, engine_id="decode"), (rank_of(),))


def test_the_order_of_groups_and_of_regions_does_not_matter() -> None:
    sliding = replace(GROUP, name="sliding", layers=(2, 3))
    engine = replace(ENGINE, groups=(GROUP, sliding))
    other = replace(ENGINE, groups=(sliding, GROUP))
    both = (
        rank_of().regions[0],
        replace(rank_of().regions[0], group="sliding", layers=(2, 3), offset_bytes=4096),
    )

    check_compatible(
        engine,
        (replace(rank_of(), regions=both),),
        other,
        (replace(rank_of(), regions=both[::-1]),),
    )
