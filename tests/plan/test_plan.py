"""A plan's numbers are those that one gets by hand."""

from typing import Any

import pytest

from kvbus.errors import ConfigError, ErrorCode, GeometryError
from kvbus.plan.plan import DECODE_STEP, PREFILL_STEP, PathOption, Plan, PlanOptions, make_plan
from kvbus.plan.spec import read_engine
from kvbus.plan.synthetic_engine import synthesize
from kvbus.planning import Path, whole_spans

SMALL = "kv_heads=8,head=4,layers=2,dtype=f16"
HEAD_BYTES = 4 * 2


def planned(prefill: str, decode: str, tokens: int, **options: Any) -> Plan:
    return make_plan(PlanOptions(prefill=prefill, decode=decode, tokens=tokens, **options))


def num_descriptors(plan: Plan) -> dict[str, int]:
    return {path.value: one.num_descriptors for path, one in plan.paths.items()}


def test_equal_engines_read_each_block_of_each_layer() -> None:
    plan = planned(SMALL, SMALL, 32)

    assert plan.num_bytes == 2 * 2 * 32 * 8 * HEAD_BYTES  # layers, parts, tokens, heads
    assert num_descriptors(plan) == {"direct": 4, "packed": 1, "reordered": 4}
    assert plan.chosen is Path.DIRECT


def test_blocks_of_a_busy_cache_do_not_merge() -> None:
    plan = planned(SMALL, SMALL, 16 * 200)

    assert num_descriptors(plan)["direct"] == 2 * 200


def test_blocks_in_order_merge() -> None:
    plan = planned(SMALL, SMALL, 32, contiguous=True)

    assert num_descriptors(plan)["direct"] == 2


def test_nhd_for_twice_the_ranks_reads_each_token() -> None:
    plan = planned(SMALL, f"tp=2,{SMALL}", 32)

    assert [(read.prefill_rank, read.decode_rank) for read in plan.reads] == [(0, 0), (0, 1)]
    assert [read.heads for read in plan.reads] == [(0, 4), (4, 8)]
    assert {read.num_bytes for read in plan.reads} == {2 * 2 * 32 * 4 * HEAD_BYTES}
    # ranks * layers * parts * tokens; a box for each share; ranks * layers * blocks
    assert num_descriptors(plan) == {"direct": 256, "packed": 2, "reordered": 8}


def test_a_prefix_is_not_read_though_its_block_is_in_the_slot() -> None:
    plan = planned(SMALL, SMALL, 40, first_token=20)

    packed, reordered = plan.paths.get(Path.PACKED), plan.paths.get(Path.REORDERED)
    assert packed
    assert reordered
    assert plan.num_bytes == 2 * 2 * 20 * 8 * HEAD_BYTES
    assert {one.num_bytes for one in plan.paths.values()} == {plan.num_bytes}
    assert {one.over_read_bytes for one in plan.paths.values()} == {0}
    assert packed.slot_bytes == plan.num_bytes
    assert reordered.slot_bytes == 2 * 2 * 32 * 8 * HEAD_BYTES
    assert num_descriptors(plan)["direct"] == 2 * 2 * 2  # layers, parts, blocks, each in part


def test_replicas_are_read_once_for_each_reader() -> None:
    plan = planned(f"tp=16,{SMALL}", f"tp=1,{SMALL}", 16)

    assert len(plan.reads) == 8
    assert plan.unread_ranks == (1, 3, 5, 7, 9, 11, 13, 15)
    assert plan.num_bytes == 2 * 2 * 16 * 8 * HEAD_BYTES


@pytest.mark.parametrize(
    ("decode_tp", "num_boxes", "num_copies"), [(8, 8, 1), (16, 8, 2), (32, 8, 4)]
)
def test_what_ranks_hold_alike_is_packed_once(
    decode_tp: int, num_boxes: int, num_copies: int
) -> None:
    plan = planned(SMALL, f"tp={decode_tp},{SMALL}", 32)

    packed = plan.paths[Path.PACKED]
    assert packed.num_boxes == packed.num_descriptors == num_boxes
    assert packed.num_bytes == packed.slot_bytes == 2 * 2 * 32 * 8 * HEAD_BYTES
    assert packed.scattered_bytes == plan.num_bytes == num_copies * packed.num_bytes


def test_stages_are_read_by_layer() -> None:
    plan = planned(f"pp=2,{SMALL}", SMALL, 16)

    assert [(read.prefill_rank, read.layers) for read in plan.reads] == [(0, (0,)), (1, (1,))]


@pytest.mark.parametrize(("theirs", "first"), [(16, 80), (8, 88), (4, 88), (6, 90), (32, 80)])
def test_a_window_moves_its_tail_only_and_its_first_block_as_far_as_both_have_it(
    theirs: int, first: int
) -> None:
    plan = planned(f"window=10,{SMALL},block={theirs}", f"window=10,{SMALL}", 100)

    assert {read.group: read.positions for read in plan.reads} == {
        "full": (0, 100),
        "window": (first, 100),
    }


def test_no_tokens_are_no_reads() -> None:
    plan = planned(SMALL, SMALL, 7, first_token=7)

    assert (plan.reads, plan.num_bytes) == ((), 0)
    assert num_descriptors(plan) == {"direct": 0}


def test_boxes_fit_their_slots() -> None:
    plan = planned(SMALL, SMALL, 1024, slot_bytes=4096)

    packed = plan.paths.get(Path.PACKED)
    assert packed
    assert packed.box_bytes == 4096
    assert packed.num_boxes == plan.num_bytes // 4096


def test_a_box_holds_a_block_at_least() -> None:
    spec = "block=4096,kv_heads=8,head=128,layers=2"

    plan = planned(spec, spec, 64, slot_bytes=64 << 20)

    reordered = plan.paths.get(Path.REORDERED)
    assert reordered
    assert reordered.box_bytes == 2 * 4096 * 8 * 128 * 2  # parts, tokens, heads, dims and bytes
    assert (reordered.num_boxes, reordered.slot_bytes) == (2, 2 * reordered.box_bytes)


def test_a_path_whose_boxes_fit_no_slot_is_no_path() -> None:
    plan = planned(
        f"block=64,{SMALL}",
        f"block=64,{SMALL}",
        9,
        slot_bytes=4096,
    )

    assert set(num_descriptors(plan)) == {"direct", "packed"}
    with pytest.raises(ConfigError, match="cannot take reordered, it can take direct, packed"):
        planned(
            f"block=64,{SMALL}",
            f"block=64,{SMALL}",
            9,
            path=PathOption.REORDERED,
            slot_bytes=4096,
        )


def test_a_path_that_is_asked_for_is_chosen() -> None:
    plan = planned(SMALL, SMALL, 32, path=PathOption.PACKED)

    assert plan.chosen is Path.PACKED
    assert min(plan.paths, key=lambda path: plan.paths[path].seconds) is Path.DIRECT


def test_a_plan_of_more_reads_than_are_made_counts_them() -> None:
    spec = "kv_heads=8,head=128,layers=32"

    plan = planned(spec, f"layout=HND,{spec}", 131072)

    assert num_descriptors(plan)["direct"] == 32 * 2 * 8 * 131072


def test_the_same_request_gives_the_same_plan() -> None:
    first, second = (planned(SMALL, f"tp=3,{SMALL}", 99) for _ in range(2))

    assert first == second


@pytest.mark.parametrize(
    ("decode", "field", "values"),
    [
        ("kv_heads=4,head=4,layers=2,dtype=f16", "attention.num_kv_heads", ("8", "4")),
        ("kv_heads=8,head=8,layers=2,dtype=f16", "attention.head_dim", ("4", "8")),
        ("kv_heads=8,head=4,layers=3,dtype=f16", "attention.layers", ("0,1", "0,1,2")),
        (f"{SMALL[:-3]}bf16", "attention.dtype", ("float16", "bfloat16")),
        (f"window=3,{SMALL}", "groups", ("attention", "full,window")),
        (f"model=other,{SMALL}", "model", ("unnamed", "other")),
    ],
)
def test_engines_that_differ_in_more_than_shape_are_refused(
    decode: str, field: str, values: tuple[str, str]
) -> None:
    with pytest.raises(GeometryError) as caught:
        planned(SMALL, decode, 1)

    assert caught.value.code is ErrorCode.INCOMPATIBLE
    assert caught.value.detail == {"field": field, "prefill": values[0], "decode": values[1]}


@pytest.mark.parametrize(
    ("spec", "tokens", "told"),
    [
        (f"block=1,{SMALL}", 1 << 24, "--tokens: 16777216 tokens are 16777216 blocks of group"),
        ("kv_heads=4096,head=65536,layers=512,dtype=f32", 1 << 20, "--from: a rank would have"),
        ("tp=1024,kv_heads=8,head=128,layers=1", 1, "at most 524288 can be planned"),
    ],
)
def test_a_plan_that_would_be_too_large_is_refused(spec: str, tokens: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        planned(spec, spec, tokens)


@pytest.mark.parametrize("step", [None, PREFILL_STEP, DECODE_STEP])
@pytest.mark.parametrize("num_blocks", [1, 7, 64, 1000])
def test_no_block_of_a_synthetic_request_is_there_twice(
    num_blocks: int, step: float | None
) -> None:
    planned = read_engine("--from", SMALL)
    spans = whole_spans(planned.engine.groups, planned.engine.groups, 0, 16 * num_blocks)

    table = synthesize(planned, spans, step=step).tables["attention"]

    assert len(set(table.array().tolist())) == num_blocks
