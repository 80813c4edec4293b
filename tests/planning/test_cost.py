"""The cost model: what it predicts, what it may never predict, and what it chooses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import LocalError
from kvbus.planning import (
    ALL_PATHS,
    Choice,
    FetchShape,
    Path,
    PathWork,
    Rates,
    box_sizes,
    choose,
    predict,
)

KIB, MIB = 1 << 10, 1 << 20
SLOT_BYTES = 8 * MIB

BYTES = st.integers(1, 1 << 36)
COUNT = st.integers(1, 1 << 22)
RUN = st.floats(1, 1 << 24)
RATE = st.floats(1e6, 1e12)
SECONDS = st.floats(0, 1e-2)

RATES = st.builds(
    Rates,
    seconds_per_descriptor=SECONDS,
    wire_bytes_per_s=RATE,
    seconds_per_read=SECONDS,
    seconds_per_request=SECONDS,
    gather_bytes_per_s=RATE,
    seconds_per_gathered_run=SECONDS,
    scatter_bytes_per_s=RATE,
    seconds_per_scattered_run=SECONDS,
    copy_bytes_per_s=RATE,
    seconds_per_copied_run=SECONDS,
    seconds_per_copy=SECONDS,
    num_cores=st.integers(1, 64),
    slots_in_flight=st.integers(1, 16),
)


@st.composite
def shapes(draw: st.DrawFn) -> FetchShape:
    num_bytes, num_shares = draw(BYTES), draw(st.integers(1, 64))
    return {
        Path.DIRECT: PathWork(num_bytes=num_bytes, num_descriptors=draw(COUNT)),
        Path.PACKED: PathWork(
            num_bytes=num_bytes,
            gather_run_bytes=draw(RUN),
            scatter_run_bytes=draw(RUN),
            num_shares=num_shares,
            num_copies=draw(st.floats(1, 64)),
        ),
        Path.REORDERED: PathWork(
            num_bytes=num_bytes,
            gather_run_bytes=draw(RUN),
            num_descriptors=draw(COUNT),
            num_shares=num_shares,
        ),
        Path.MAPPED: PathWork(num_bytes=num_bytes, num_copied_runs=draw(COUNT)),
    }


def seconds(shape: FetchShape, path: Path, rates: Rates, slot_bytes: int = SLOT_BYTES) -> float:
    return predict(shape, path, rates, slot_bytes=slot_bytes).seconds


def with_bytes(shape: FetchShape, num_bytes: int) -> FetchShape:
    return {path: replace(work, num_bytes=num_bytes) for path, work in shape.items()}


def with_all(shape: FetchShape, **changes: Any) -> FetchShape:
    """The shape with these fields changed in whatever path has them."""
    return {
        path: replace(work, **{k: v for k, v in changes.items() if getattr(work, k) is not None})
        for path, work in shape.items()
    }


def at_least(value: float, other: float) -> bool:
    """But for rounding."""
    return value >= other * (1 - 1e-9)


NHD_TP_1_TO_2 = {
    Path.DIRECT: PathWork(num_bytes=64 * MIB, num_descriptors=65_536),
    Path.PACKED: PathWork(num_bytes=64 * MIB, gather_run_bytes=KIB, scatter_run_bytes=16 * KIB),
    Path.REORDERED: PathWork(num_bytes=64 * MIB, gather_run_bytes=KIB, num_descriptors=4096),
}


def test_the_predictions_are_near_what_the_development_machine_took() -> None:
    one_lane = Rates(slots_in_flight=1)

    direct = seconds(NHD_TP_1_TO_2, Path.DIRECT, one_lane)
    packed = seconds(NHD_TP_1_TO_2, Path.PACKED, one_lane)
    reordered = seconds(NHD_TP_1_TO_2, Path.REORDERED, one_lane)

    assert direct == pytest.approx(0.126, rel=0.25)
    assert packed == pytest.approx(0.029, rel=0.25)
    assert reordered == pytest.approx(0.027, rel=0.25)


def test_short_runs_are_packed_and_long_ones_are_read_directly() -> None:
    equal = with_all(NHD_TP_1_TO_2, num_descriptors=1024, gather_run_bytes=64 * KIB)

    split = choose(NHD_TP_1_TO_2, Rates(), slot_bytes=SLOT_BYTES)
    same = choose(equal, Rates(), slot_bytes=SLOT_BYTES)

    assert split.path in {Path.PACKED, Path.REORDERED}
    assert (same.path, same.box_bytes) == (Path.DIRECT, None)


LATENT_TP_1_TO_8 = {
    Path.DIRECT: PathWork(num_bytes=8 * 64 * MIB, num_descriptors=8 * 512),
    Path.PACKED: PathWork(
        num_bytes=64 * MIB,
        gather_run_bytes=128 * KIB,
        scatter_run_bytes=128 * KIB,
        num_copies=8,
    ),
}


def test_one_read_for_all_replicas_pays_over_a_slow_wire_and_not_on_shared_memory() -> None:
    slow = Rates(wire_bytes_per_s=1.5e9)

    over_tcp = choose(LATENT_TP_1_TO_8, slow, slot_bytes=SLOT_BYTES)
    on_this_machine = choose(LATENT_TP_1_TO_8, Rates(), slot_bytes=SLOT_BYTES)

    assert over_tcp.path is Path.PACKED
    assert on_this_machine.path is Path.DIRECT


def test_every_copy_of_a_byte_is_a_scatter_of_its_own() -> None:
    rates = Rates(seconds_per_scattered_run=1e-6)
    once = {Path.PACKED: replace(LATENT_TP_1_TO_8[Path.PACKED], num_copies=1)}

    of_all, of_one = (
        predict(shape, Path.PACKED, rates, slot_bytes=256 * KIB).stages
        for shape in (LATENT_TP_1_TO_8, once)
    )

    assert of_all.scatter_s == pytest.approx(8 * of_one.scatter_s)
    assert (of_all.gather_s, of_all.read_s) == (of_one.gather_s, of_one.read_s)


def test_a_pipeline_takes_one_box_and_then_the_pace_of_its_longest_stage() -> None:
    rates = Rates(
        seconds_per_descriptor=0,
        seconds_per_read=0,
        seconds_per_request=0,
        seconds_per_gathered_run=0,
        seconds_per_scattered_run=0,
        seconds_per_copy=0,
        gather_bytes_per_s=4 * MIB,
        wire_bytes_per_s=2 * MIB,
        scatter_bytes_per_s=1 * MIB,
        num_cores=8,
        slots_in_flight=3,
    )
    shape = {Path.PACKED: PathWork(num_bytes=8 * MIB, gather_run_bytes=1, scatter_run_bytes=1)}

    def with_lanes(num_cores: int, slots_in_flight: int) -> float:
        few = replace(rates, num_cores=num_cores, slots_in_flight=slots_in_flight)
        return seconds(shape, Path.PACKED, few, slot_bytes=256 * KIB)

    box_s = 1 / 16 + 1 / 8 + 1 / 4
    assert with_lanes(8, 3) == pytest.approx(box_s + 31 * 1 / 4)
    assert with_lanes(2, 3) == pytest.approx(box_s + 31 * 1 / 4)
    assert with_lanes(1, 3) == pytest.approx(32 * box_s)
    assert with_lanes(8, 1) == pytest.approx(32 * box_s)


def test_boxes_are_large_where_requests_are_dear_and_small_where_they_are_free() -> None:
    dear = replace(Rates(), seconds_per_request=10e-3)
    free = replace(
        Rates(),
        seconds_per_request=0,
        seconds_per_read=0,
        seconds_per_descriptor=0,
        seconds_per_copy=0,
    )

    large = predict(NHD_TP_1_TO_2, Path.PACKED, dear, slot_bytes=SLOT_BYTES)
    small = predict(NHD_TP_1_TO_2, Path.PACKED, free, slot_bytes=SLOT_BYTES)

    assert (large.box_bytes, large.num_boxes) == (8 * MIB, 8)
    assert (small.box_bytes, small.num_boxes) == (256 * KIB, 256)


def test_a_box_never_spans_two_shares() -> None:
    work = PathWork(num_bytes=3 * MIB, gather_run_bytes=1, scatter_run_bytes=1, num_shares=6)
    dear = replace(Rates(), seconds_per_request=1.0, slots_in_flight=1)

    found = predict({Path.PACKED: work}, Path.PACKED, dear, slot_bytes=SLOT_BYTES)

    assert (found.box_bytes, found.num_boxes) == (8 * MIB, 6)
    assert found.seconds == pytest.approx(found.stages.sum_s)
    assert 6 <= found.stages.gather_s < 7


def test_every_box_is_read_by_one_descriptor_at_least() -> None:
    work = PathWork(num_bytes=8 * MIB, gather_run_bytes=MIB, num_descriptors=1)
    rates = replace(Rates(), seconds_per_descriptor=1.0)

    found = predict({Path.REORDERED: work}, Path.REORDERED, rates, slot_bytes=256 * KIB)

    assert 32 <= found.stages.read_s < 33


def test_equal_predictions_choose_direct() -> None:
    rates = Rates(
        seconds_per_descriptor=0,
        seconds_per_read=0,
        seconds_per_request=0,
        seconds_per_gathered_run=0,
        seconds_per_scattered_run=0,
        wire_bytes_per_s=1 << 33,
        gather_bytes_per_s=1 << 33,
        num_cores=1,
    )
    nothing = with_all(with_bytes(NHD_TP_1_TO_2, 0), num_descriptors=0)
    some = {
        Path.DIRECT: PathWork(num_bytes=MIB, num_descriptors=1),
        Path.REORDERED: PathWork(num_bytes=MIB, gather_run_bytes=1, num_descriptors=1),
    }

    of_nothing = choose(nothing, Rates(), slot_bytes=SLOT_BYTES)
    of_some = choose(some, rates, slot_bytes=SLOT_BYTES, corrections={Path.DIRECT: 2.0})

    assert of_nothing.path is Path.DIRECT
    assert of_some.path is Path.DIRECT
    assert len({prediction.seconds for prediction in of_some.predictions}) == 1


def test_a_path_that_a_fetch_cannot_take_is_not_chosen() -> None:
    only_packed = {Path.PACKED: NHD_TP_1_TO_2[Path.PACKED]}

    choice = choose(only_packed, Rates(), slot_bytes=SLOT_BYTES)
    forced = choose(NHD_TP_1_TO_2, Rates(), slot_bytes=SLOT_BYTES, paths={Path.DIRECT})

    assert [prediction.path for prediction in choice.predictions] == [Path.PACKED]
    assert [prediction.path for prediction in forced.predictions] == [Path.DIRECT]
    with pytest.raises(LocalError, match="none of the paths"):
        choose(only_packed, Rates(), slot_bytes=SLOT_BYTES, paths={Path.DIRECT})
    with pytest.raises(LocalError, match="cannot take"):
        predict(only_packed, Path.DIRECT, Rates(), slot_bytes=SLOT_BYTES)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Rates(wire_bytes_per_s=0),
        lambda: Rates(seconds_per_read=-1e-9),
        lambda: Rates(gather_bytes_per_s=float("inf")),
        lambda: Rates(seconds_per_descriptor=float("nan")),
        lambda: Rates(num_cores=0),
        lambda: PathWork(num_bytes=-1, num_descriptors=1),
        lambda: PathWork(num_bytes=1, gather_run_bytes=0, scatter_run_bytes=1),
        lambda: PathWork(num_bytes=1, gather_run_bytes=1, scatter_run_bytes=float("nan")),
        lambda: PathWork(num_bytes=1, gather_run_bytes=1, num_descriptors=1, num_shares=0),
        lambda: box_sizes(0),
    ],
)
def test_figures_that_make_no_sense_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(LocalError):
        wrong()


@given(shapes(), RATES, st.integers(1, 1 << 28))
def test_the_choice_is_the_best_prediction_and_always_the_same(
    shape: FetchShape, rates: Rates, slot_bytes: int
) -> None:
    choice = choose(shape, rates, slot_bytes=slot_bytes)

    best = {prediction.path: prediction.seconds for prediction in choice.predictions}
    assert set(best) == set(ALL_PATHS)
    assert best[choice.path] == min(best.values())
    assert isinstance(choice, Choice)
    assert choice == choose(shape, rates, slot_bytes=slot_bytes)
    assert choice.box_bytes is None or choice.box_bytes <= slot_bytes


@given(shapes(), RATES, st.integers(0, 1 << 36), st.floats(1, 1000), st.integers(1, 1 << 28))
def test_more_work_is_never_faster_and_a_better_machine_never_slower(
    shape: FetchShape, rates: Rates, more: int, factor: float, slot_bytes: int
) -> None:
    packed, reordered = shape[Path.PACKED], shape[Path.REORDERED]
    alike = with_all(shape, gather_run_bytes=packed.gather_run_bytes)
    longer = with_all(
        alike,
        gather_run_bytes=given_of(packed.gather_run_bytes) * factor,
        scatter_run_bytes=given_of(packed.scatter_run_bytes) * factor,
    )
    more_bytes = with_bytes(shape, packed.num_bytes + more)
    shapes_of_more = (
        more_bytes,
        with_all(shape, num_copied_runs=given_of(shape[Path.MAPPED].num_copied_runs) + more),
        *(
            {**shape, path: replace(work, num_descriptors=given_of(work.num_descriptors) + more)}
            for path, work in ((Path.DIRECT, shape[Path.DIRECT]), (Path.REORDERED, reordered))
        ),
    )
    better = (
        replace(rates, num_cores=rates.num_cores + 1),
        replace(rates, slots_in_flight=rates.slots_in_flight + 1),
    )

    for path in ALL_PATHS:
        now, in_slots = (seconds(shape, path, rates, size) for size in (SLOT_BYTES, slot_bytes))
        assert at_least(seconds(more_bytes, path, rates, slot_bytes), in_slots)
        for grown in shapes_of_more:
            assert at_least(seconds(grown, path, rates), now)
        for one in better:
            assert at_least(now, seconds(shape, path, one))
        assert at_least(now, seconds(shape, path, rates, 2 * SLOT_BYTES))
        assert at_least(seconds(alike, path, rates), seconds(longer, path, rates))


def given_of(value: float | None) -> Any:
    assert value is not None
    return value


@given(shapes(), RATES)
def test_no_rate_of_a_read_matters_to_a_copy(shape: FetchShape, rates: Rates) -> None:
    slow = replace(rates, seconds_per_read=1.0, seconds_per_request=1.0, wire_bytes_per_s=1.0)

    assert seconds(shape, Path.MAPPED, slow) == seconds(shape, Path.MAPPED, rates)


def test_a_mapped_fetch_is_one_copy_without_boxes_and_needs_no_slot() -> None:
    work = PathWork(num_bytes=10 * MIB, num_copied_runs=1000)
    rates = replace(
        Rates(), copy_bytes_per_s=10 * MIB, seconds_per_copied_run=1e-3, seconds_per_copy=0.5
    )

    found = predict({Path.MAPPED: work}, Path.MAPPED, rates, slot_bytes=1)

    assert found.seconds == found.stages.copy_s == pytest.approx(1 + 1 + 0.5)
    assert (found.box_bytes, found.num_boxes) == (None, 0)


def test_mapped_memory_is_copied_where_both_sides_differ_and_where_they_are_alike() -> None:
    split = {**NHD_TP_1_TO_2, Path.MAPPED: PathWork(num_bytes=64 * MIB, num_copied_runs=65_536)}
    same = with_all(split, num_descriptors=16, num_copied_runs=16, gather_run_bytes=4 * MIB)

    for shape in (split, same):
        assert choose(shape, Rates(), slot_bytes=SLOT_BYTES).path is Path.MAPPED


@given(shapes(), RATES)
def test_a_pipeline_is_between_its_longest_stage_and_the_sum_of_all(
    shape: FetchShape, rates: Rates
) -> None:
    for path in (Path.PACKED, Path.REORDERED):
        found = predict(shape, path, rates, slot_bytes=SLOT_BYTES)

        assert at_least(found.seconds, found.stages.longest_s)
        assert at_least(found.stages.sum_s, found.seconds)


@given(shapes(), RATES, st.floats(0.01, 100))
def test_a_correction_multiplies_the_seconds_and_not_the_stages(
    shape: FetchShape, rates: Rates, factor: float
) -> None:
    for path in ALL_PATHS:
        plain = predict(shape, path, rates, slot_bytes=SLOT_BYTES)
        corrected = predict(shape, path, rates, slot_bytes=SLOT_BYTES, correction=factor)

        assert corrected.seconds == pytest.approx(plain.seconds * factor)
        assert (corrected.stages, corrected.correction) == (plain.stages, factor)
