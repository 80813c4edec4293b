"""All ranks of an engine together: which layers and heads each holds, and what must not be missing.

Covers `lay_out_rank` over stages, `validate_ranks`, and what tokens of a request need of a group.
"""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import (
    EngineSpec,
    GroupSpec,
    KvLayout,
    PartShape,
    RankSpec,
    StatePart,
    held_layers,
    lay_out_rank,
    layer_interval,
    state_group,
    validate_engine,
    validate_rank,
    validate_ranks,
)
from tests.examples import num_examples

replace = msgspec.structs.replace
PARTS = (StatePart("conv", 1, 6), StatePart("ssm", 4, 8))
FULL = GroupSpec("full", (0, 2, 4), 4, 2, 8, "float16")
STATE = state_group("mamba", (1, 3), PARTS)
ENGINE = EngineSpec("e", "m", 2, (FULL, STATE), 2)
LAYOUTS = [
    KvLayout.parse("NHD"),
    KvLayout.parse("HND"),
    KvLayout.parse("NHD", cross_layer=True),
    KvLayout.parse("kv,layer,block,token,head,dim"),
]


def ranks_of(engine: EngineSpec, layout: KvLayout = LAYOUTS[0]) -> list[RankSpec]:
    return [lay_out_rank(engine, rank, layout, num_blocks=3) for rank in range(engine.num_ranks)]


def held_of(rank: RankSpec) -> set[tuple[int, str, range]]:
    return {
        (layer, part, range(region.first_head, region.first_head + region.num_heads))
        for region in rank.regions
        for layer in region.layers
        for part in region.parts
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: ",".join(layout.axes))
def test_ranks_count_heads_within_a_stage_and_layers_over_the_stages(layout: KvLayout) -> None:
    first, second = range(1), range(1, 2)

    held = [held_of(rank) for rank in ranks_of(ENGINE, layout)]

    assert held == [
        {
            (0, "k", heads),
            (0, "v", heads),
            (1, "conv", first),
            (1, "ssm", range(2 * number, 2 * number + 2)),
        }
        for number, heads in enumerate((first, second))
    ] + [
        {(layer, part, heads) for layer in (2, 4) for part in ("k", "v")}
        | {(3, "conv", first), (3, "ssm", range(2 * number, 2 * number + 2))}
        for number, heads in enumerate((first, second))
    ]


@settings(max_examples=num_examples(150), deadline=None)
@given(
    tp_size=st.integers(1, 6),
    pp_size=st.integers(1, 5),
    num_heads=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
)
def test_every_rank_that_is_laid_out_passes_and_so_do_all_together(
    tp_size: int, pp_size: int, num_heads: int, layout: KvLayout
) -> None:
    engine = EngineSpec("e", "m", tp_size, (replace(FULL, num_kv_heads=num_heads), STATE), pp_size)

    ranks = ranks_of(engine, layout)

    for rank in ranks:
        validate_rank(engine, rank)
    validate_ranks(engine, iter(ranks))


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_stages_have_all_layers_in_order_and_evenly(pp_size: int, num_layers: int) -> None:
    stages = [range(*layer_interval(stage, pp_size, num_layers)) for stage in range(pp_size)]

    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_ranks_of_one_stage_hold_the_same_layers_by_number() -> None:
    held = [held_layers(ENGINE, rank) for rank in range(ENGINE.num_ranks)]

    assert held == [{0, 1}, {0, 1}, {2, 3, 4}, {2, 3, 4}]


def test_a_stage_without_a_layer_cannot_be_laid_out() -> None:
    with pytest.raises(GeometryError) as refused:
        lay_out_rank(replace(ENGINE, pp_size=6), 0, LAYOUTS[0], num_blocks=3)

    assert refused.value.detail["field"] == "pp_size"


def test_blocks_are_counted_by_group_when_they_differ() -> None:
    rank = lay_out_rank(ENGINE, 0, LAYOUTS[0], num_blocks={"full": 7, "mamba": 2})

    blocks = {region.group: region.axes[0].size for region in rank.regions}

    assert blocks == {"full": 7, "mamba": 2}


def without(ranks: list[RankSpec], number: int, kind: Callable[[RankSpec], object]) -> RankSpec:
    """Rank ``number`` without the regions for which ``kind`` is true."""
    rank = ranks[number]
    return replace(rank, regions=tuple(one for one in rank.regions if not kind(one)))


def changed(number: int, kind: Callable[..., object]) -> list[RankSpec]:
    ranks = ranks_of(ENGINE)
    return [*ranks[:number], without(ranks, number, kind), *ranks[number + 1 :]]


INCOMPLETE: dict[str, tuple[Callable[[], list[RankSpec]], str]] = {
    "rank_missing": (lambda: ranks_of(ENGINE)[:3], r"ranks \[0, 1, 2\] of 4"),
    "rank_twice": (lambda: [*ranks_of(ENGINE)[:3], ranks_of(ENGINE)[0]], r"\[0, 0, 1, 2\] of 4"),
    "rank_too_many": (
        lambda: [*ranks_of(ENGINE), replace(ranks_of(ENGINE)[0], rank=4)],
        r"\[0, 1, 2, 3, 4\] of 4",
    ),
    "none": (list, r"\[\] of 4"),
    "head_missing": (lambda: changed(1, lambda one: one.layers == (0,)), "head 1 of 0/k"),
    "unit_missing": (lambda: changed(0, lambda one: one.parts == ("ssm",)), "head 0 of 1/ssm"),
    "layer_missing": (
        lambda: [
            without(ranks_of(ENGINE), number, lambda one: one.layers == (4,)) for number in range(4)
        ],
        "head 0 of 4/k",
    ),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_ranks_that_do_not_hold_all_together_are_refused_by_what_is_missing(case: str) -> None:
    make, named = INCOMPLETE[case]

    with pytest.raises(GeometryError, match=named) as refused:
        validate_ranks(ENGINE, make())

    assert refused.value.detail["field"] == "ranks"


def test_a_replica_may_be_missing() -> None:
    validate_ranks(ENGINE, changed(1, lambda one: one.parts == ("conv",)))


def test_a_rank_of_a_stage_may_lack_layers_but_not_a_part_of_one() -> None:
    rank = ranks_of(ENGINE)[2]
    validate_rank(ENGINE, without([rank], 0, lambda one: one.layers == (4,)))

    with pytest.raises(GeometryError, match="such as 3/ssm") as refused:
        validate_rank(ENGINE, without([rank], 0, lambda one: one.parts == ("ssm",)))

    assert refused.value.detail["field"] == "regions"


def test_a_rank_of_an_engine_without_stages_lacks_no_layer() -> None:
    engine = replace(ENGINE, pp_size=1)
    rank = lay_out_rank(engine, 0, LAYOUTS[0], num_blocks=3)

    with pytest.raises(GeometryError, match="such as 4/k"):
        validate_rank(engine, without([rank], 0, lambda one: one.layers == (4,)))


def test_parts_of_different_shapes_do_not_share_a_region() -> None:
    rank = ranks_of(ENGINE)[0]
    conv = next(region for region in rank.regions if region.parts == ("conv",))
    regions = tuple(
        replace(conv, parts=("conv", "ssm")) if region is conv else region
        for region in rank.regions
    )

    with pytest.raises(GeometryError, match="different shapes") as refused:
        validate_rank(ENGINE, replace(rank, regions=regions))

    assert refused.value.detail["field"] == "parts"


STATE_REFUSALS: dict[str, tuple[str, dict[str, object]]] = {
    "blocks_of_tokens": ("state", {"block_size": 4}),
    "another_dtype": ("state", {"dtype": "float16"}),
    "a_window": ("state", {"window": 4}),
    "parts_of_other_names": ("state", {"parts": ("conv", "other")}),
    "parts_in_another_order": ("state", {"parts": ("ssm", "conv")}),
    "a_part_twice": ("parts", {"parts": ("ssm", "ssm"), "state": (PARTS[1], PARTS[1])}),
}


@pytest.mark.parametrize("case", STATE_REFUSALS)
def test_a_state_that_contradicts_itself_is_refused(case: str) -> None:
    field, changes = STATE_REFUSALS[case]

    with pytest.raises(GeometryError) as refused:
        validate_engine(replace(ENGINE, groups=(FULL, replace(STATE, **changes))))

    assert refused.value.detail["field"] == field


def test_a_state_as_it_is_made_passes() -> None:
    validate_engine(ENGINE)


def test_the_shape_of_a_part_is_that_of_its_group_or_of_the_state_part() -> None:
    assert FULL.part_shape("k") == PartShape(2, 8)
    assert STATE.part_shape("conv") == PartShape(1, 6)
    assert STATE.part_shape("ssm") == PartShape(4, 8)
    with pytest.raises(KeyError):
        STATE.part_shape("k")


@given(st.integers(0, 30), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 40)))
def test_tokens_need_their_own_positions_within_the_window_of_the_last(
    start: int, stop: int, window: int | None
) -> None:
    group = replace(FULL, window=window)
    seen = [
        position for position in range(start, stop) if window is None or position >= stop - window
    ]

    assert list(range(*group.positions(start, stop))) == seen


@given(st.integers(0, 30), st.integers(0, 30))
def test_any_token_needs_the_one_position_of_a_state(start: int, stop: int) -> None:
    assert list(range(*STATE.positions(start, stop))) == ([0] if start < stop else [])
