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
    Region,
    StatePart,
    held_layers,
    lay_out_rank,
    layer_interval,
    state_group,
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


def without(rank: RankSpec, kind: Callable[[Region], object]) -> RankSpec:
    """``rank`` without the regions for which ``kind`` is true."""
    return replace(rank, regions=tuple(one for one in rank.regions if not kind(one)))


def changed(number: int, kind: Callable[[Region], object]) -> list[RankSpec]:
    ranks = ranks_of(ENGINE)
    return [*ranks[:number], without(ranks[number], kind), *ranks[number + 1 :]]


ALL = ranks_of(ENGINE)
INCOMPLETE: dict[str, tuple[list[RankSpec], str]] = {
    "rank_missing": (ALL[:3], r"ranks \[0, 1, 2\] of 4"),
    "rank_twice": ([*ALL[:3], ALL[0]], r"\[0, 0, 1, 2\] of 4"),
    "rank_too_many": ([*ALL, replace(ALL[0], rank=4)], r"\[0, 1, 2, 3, 4\] of 4"),
    "none": ([], r"\[\] of 4"),
    "head_missing": (changed(1, lambda one: one.layers == (0,)), "head 1 of 0/k"),
    "unit_missing": (changed(0, lambda one: one.parts == ("ssm",)), "head 0 of 1/ssm"),
    "layer_missing": (
        [without(rank, lambda one: one.layers == (4,)) for rank in ALL],
        "head 0 of 4/k",
    ),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_ranks_that_do_not_hold_all_together_are_refused_by_what_is_missing(case: str) -> None:
    ranks, named = INCOMPLETE[case]

    with pytest.raises(GeometryError, match=named) as refused:
        validate_ranks(ENGINE, ranks)

    assert refused.value.detail["field"] == "ranks"


def test_a_replica_may_be_missing() -> None:
    validate_ranks(ENGINE, changed(1, lambda one: one.parts == ("conv",)))


def test_a_rank_of_a_stage_may_lack_layers_but_not_a_part_of_one() -> None:
    rank = ranks_of(ENGINE)[2]
    validate_rank(ENGINE, without(rank, lambda one: one.layers == (4,)))

    with pytest.raises(GeometryError, match="such as 3/ssm") as refused:
        validate_rank(ENGINE, without(rank, lambda one: one.parts == ("ssm",)))

    assert refused.value.detail["field"] == "regions"


def test_a_rank_of_an_engine_without_stages_lacks_no_layer() -> None:
    engine = replace(ENGINE, pp_size=1)
    rank = lay_out_rank(engine, 0, LAYOUTS[0], num_blocks=3)

    with pytest.raises(GeometryError, match="such as 4/k"):
        validate_rank(engine, without(rank, lambda one: one.layers == (4,)))


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
