"""All ranks of an engine together: what each holds, and what must not be missing."""

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
    RankSpec,
    Region,
    StatePart,
    held_layers,
    lay_out_rank,
    state_group,
    validate_rank,
    validate_ranks,
)
from tests.support.examples import num_examples

replace = msgspec.structs.replace
PARTS = (StatePart("conv", 1, 6), StatePart("ssm", 4, 8))
FULL = GroupSpec("full", (0, 2, 4), 4, 2, 8, "float16")
STATE = state_group("mamba", (1, 3), PARTS)
ENGINE = EngineSpec("e", "m", 2, (FULL, STATE), 2)
LAYOUTS = [*map(KvLayout.parse, ("NHD", "HND", "kv,layer,block,token,head,dim"))]
LAYOUTS.append(KvLayout.parse("NHD", cross_layer=True))


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
def test_ranks_split_heads_within_stage_and_layers_over_stages(layout: KvLayout) -> None:
    held = [held_of(rank) for rank in ranks_of(ENGINE, layout)]
    for rank, (layers, states) in enumerate([((0,), (1,))] * 2 + [((2, 4), (3,))] * 2):
        tp_rank = rank % 2
        assert held_layers(ENGINE, rank) == {*layers, *states}
        assert held[rank] == {
            *((layer, part, range(tp_rank, tp_rank + 1)) for layer in layers for part in "kv"),
            *((layer, "conv", range(1)) for layer in states),
            *((layer, "ssm", range(2 * tp_rank, 2 * tp_rank + 2)) for layer in states),
        }


@settings(max_examples=num_examples(150), deadline=None)
@given(
    tp_size=st.integers(1, 6),
    pp_size=st.integers(1, 5),
    num_heads=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
)
def test_laid_out_ranks_pass(tp_size: int, pp_size: int, num_heads: int, layout: KvLayout) -> None:
    engine = EngineSpec("e", "m", tp_size, (replace(FULL, num_kv_heads=num_heads), STATE), pp_size)
    for rank in (ranks := ranks_of(engine, layout)):
        validate_rank(engine, rank)
    validate_ranks(engine, iter(ranks))


def test_a_stage_without_a_layer_cannot_be_laid_out() -> None:
    with pytest.raises(GeometryError) as refused:
        lay_out_rank(replace(ENGINE, pp_size=6), 0, LAYOUTS[0], num_blocks=3)
    assert refused.value.detail["field"] == "pp_size"


def test_blocks_are_counted_by_group_when_they_differ() -> None:
    rank = lay_out_rank(ENGINE, 0, LAYOUTS[0], num_blocks={"full": 7, "mamba": 2})
    blocks = {region.group: region.axes[0].size for region in rank.regions}
    assert blocks == {"full": 7, "mamba": 2}


def without(rank: RankSpec, kind: Callable[[Region], object]) -> RankSpec:
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


@pytest.mark.parametrize(("ranks", "named"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_incomplete_ranks_are_refused_by_missing_part(ranks: list[RankSpec], named: str) -> None:
    with pytest.raises(GeometryError, match=named) as refused:
        validate_ranks(ENGINE, ranks)
    assert refused.value.detail["field"] == "ranks"


def test_a_replica_may_be_missing() -> None:
    validate_ranks(ENGINE, changed(1, lambda one: one.parts == ("conv",)))


def test_rank_of_stages_may_lack_layers_but_no_part_of_layer() -> None:
    rank, alone = ranks_of(ENGINE)[2], replace(ENGINE, pp_size=1)
    validate_rank(ENGINE, without(rank, lambda one: one.layers == (4,)))
    for engine, lacking, named in (
        (ENGINE, without(rank, lambda one: one.parts == ("ssm",)), "3/ssm"),
        (alone, without(ranks_of(alone)[0], lambda one: one.layers == (4,)), "4/k"),
    ):
        with pytest.raises(GeometryError, match=f"such as {named}") as refused:
            validate_rank(engine, lacking)
        assert refused.value.detail["field"] == "regions"


def test_same_state_in_another_group_does_not_count_as_held() -> None:
    twin = replace(STATE, name="twin")
    engine = replace(ENGINE, groups=(FULL, STATE, twin))
    validate_ranks(engine, ranks_of(engine))
    with pytest.raises(GeometryError, match="head 0 of 1/conv"):
        validate_ranks(
            engine, [without(one, lambda r: r.group == "twin") for one in ranks_of(engine)]
        )
