"""A plan's numbers are those that one gets by hand."""

from typing import Any

import pytest

from tests.plan.planning import SMALL, plan, planned

HEAD_BYTES = 4 * 2
TOKEN_BYTES = 2 * 2 * 8 * HEAD_BYTES  # layers, parts, heads
LARGE = "block=4096,kv_heads=8,head=128,layers=2"
WIDE = "kv_heads=8,head=128,layers=32"
Figures = dict[str, Any]


@pytest.mark.parametrize(
    ("prefill", "decode", "tokens", "options", "wanted"),
    [
        # layers * blocks; one box; layers * blocks
        (SMALL, SMALL, 32, "", {"direct": 4, "packed": 1, "reordered": 4, "chosen": "direct"}),
        (SMALL, SMALL, 16 * 200, "", {"direct": 2 * 200}),  # no two are neighbours
        (SMALL, SMALL, 32, "--contiguous", {"direct": 2}),
        # ranks * layers * parts * tokens; a box for each share; ranks * layers * blocks
        (SMALL, f"tp=2,{SMALL}", 32, "", {"direct": 256, "packed": 2, "reordered": 8}),
        (SMALL, SMALL, 40, "--first-token 20", {"direct": 2 * 2 * 2}),  # each block in part
        (SMALL, SMALL, 7, "--first-token 7", {"direct": 0, "packed": None, "reordered": None}),
        (WIDE, f"layout=HND,{WIDE}", 131_072, "", {"direct": 32 * 2 * 8 * 131_072}),
        (SMALL, SMALL, 32, "--path packed", {"chosen": "packed"}),
    ],
    ids=["equal", "busy", "in-order", "tp", "prefix", "nothing", "many", "asked-for"],
)
def test_each_path_reads_so_many_pieces(
    prefill: str, decode: str, tokens: int, options: str, wanted: Figures
) -> None:
    sides: Figures = {"prefill": prefill, "decode": decode, "tokens": tokens}

    found = planned(*options.split(), **sides)

    assert found == planned(*options.split(), **sides)
    paths = {name: path and path["descriptors"] for name, path in found["paths"].items()}
    assert wanted.items() <= {**paths, "chosen": found["choice"]["path"]}.items()
    assert all(path is None or path["over_read_bytes"] == 0 for path in found["paths"].values())


@pytest.mark.parametrize(
    ("prefill", "decode", "tokens", "reads", "num_bytes"),
    [
        (
            SMALL,
            f"tp=2,{SMALL}",
            32,
            [(0, 0, [0, 4], [0, 1]), (0, 1, [4, 8], [0, 1])],
            32 * TOKEN_BYTES,
        ),
        (f"pp=2,{SMALL}", SMALL, 16, [(0, 0, [0, 8], [0]), (1, 0, [0, 8], [1])], 16 * TOKEN_BYTES),
        (
            f"tp=16,{SMALL}",
            SMALL,
            16,
            [(2 * head, 0, [head, head + 1], [0, 1]) for head in range(8)],
            16 * TOKEN_BYTES,
        ),
    ],
    ids=["tp", "stages", "replicas"],
)
def test_who_reads_what_from_whom(
    prefill: str, decode: str, tokens: int, reads: list[Any], num_bytes: int
) -> None:
    found = planned(prefill=prefill, decode=decode, tokens=tokens)

    keys = ("prefill_rank", "decode_rank", "heads", "layers")
    assert [tuple(read[key] for key in keys) for read in found["reads"]] == reads
    assert found["bytes"] == sum(read["bytes"] for read in found["reads"]) == num_bytes
    assert found["unread_ranks"] == [*range(1, 16, 2)] * ("tp=16" in prefill)


def test_a_prefix_is_not_read_though_its_block_is_in_the_slot() -> None:
    found = planned("--first-token", "20", tokens=40)

    paths = found["paths"]
    assert found["bytes"] == paths["packed"]["slot_bytes"] == 20 * TOKEN_BYTES
    assert paths["reordered"]["slot_bytes"] == 32 * TOKEN_BYTES
    assert {path["bytes"] for path in paths.values() if path} == {found["bytes"]}


@pytest.mark.parametrize(("decode_tp", "num_copies"), [(8, 1), (16, 2), (32, 4)])
def test_what_ranks_hold_alike_is_packed_once(decode_tp: int, num_copies: int) -> None:
    found = planned(decode=f"tp={decode_tp},{SMALL}")

    packed = found["paths"]["packed"]
    assert packed["boxes"] == packed["descriptors"] == 8
    assert packed["bytes"] == packed["slot_bytes"] == 32 * TOKEN_BYTES
    assert packed["scattered_bytes"] == found["bytes"] == num_copies * packed["bytes"]


@pytest.mark.parametrize(("theirs", "first"), [(16, 80), (8, 88), (4, 88), (6, 90), (32, 80)])
def test_a_window_moves_its_tail_only_and_its_first_block_as_far_as_both_have_it(
    theirs: int, first: int
) -> None:
    found = planned(
        prefill=f"window=10,{SMALL},block={theirs}", decode=f"window=10,{SMALL}", tokens=100
    )

    assert {read["group"]: read["positions"] for read in found["reads"]} == {
        "full": [0, 100],
        "window": [first, 100],
    }


def test_boxes_fit_their_slots_and_hold_a_block_at_least() -> None:
    small = planned("--slot-bytes", "4096", tokens=1024)
    large = planned("--slot-bytes", str(64 << 20), prefill=LARGE, decode=LARGE, tokens=64)

    packed, reordered = small["paths"]["packed"], large["paths"]["reordered"]
    assert (packed["box_bytes"], packed["boxes"]) == (4096, small["bytes"] // 4096)
    assert reordered["box_bytes"] == 2 * 4096 * 8 * 128 * 2  # parts, tokens, heads, dims and bytes
    assert (reordered["boxes"], reordered["slot_bytes"]) == (2, 2 * reordered["box_bytes"])


def test_a_path_whose_boxes_fit_no_slot_is_no_path() -> None:
    spec = f"block=64,{SMALL}"
    sides: Figures = {"prefill": spec, "decode": spec, "tokens": 9}

    found = planned("--slot-bytes", "4096", **sides)
    refused = plan("--slot-bytes", "4096", "--path", "reordered", **sides)

    assert {name for name, path in found["paths"].items() if path} == {"direct", "packed"}
    assert refused.exit_code == 2
    assert "cannot take reordered, it can take direct, packed" in refused.stderr


@pytest.mark.parametrize(
    ("decode", "told"),
    [
        ("kv_heads=4,head=4,layers=2,dtype=f16", "attention.num_kv_heads: prefill has 8, decode 4"),
        ("kv_heads=8,head=8,layers=2,dtype=f16", "attention.head_dim: prefill has 4, decode has 8"),
        ("kv_heads=8,head=4,layers=3,dtype=f16", "attention.layers: prefill has 0,1, decode has 0"),
        (f"{SMALL[:-3]}bf16", "attention.dtype: prefill has float16, decode has bfloat16"),
        (f"window=3,{SMALL}", "groups: prefill has attention, decode has full,window"),
        (f"model=other,{SMALL}", "model: prefill has unnamed, decode has other"),
    ],
    ids=["heads", "head", "layers", "dtype", "groups", "model"],
)
def test_engines_that_differ_in_more_than_shape_are_one_line_and_status_1(
    decode: str, told: str
) -> None:
    result = plan(decode=decode)

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert told.replace("decode 4", "decode has 4") in result.stderr


@pytest.mark.parametrize(
    ("spec", "tokens", "told"),
    [
        (f"block=1,{SMALL}", 1 << 24, "--tokens: 16777216 tokens are 16777216 blocks of group"),
        ("kv_heads=4096,head=65536,layers=512,dtype=f32", 1 << 20, "--from: a rank would have"),
        ("tp=1024,kv_heads=8,head=128,layers=1", 1, "at most 524288 can be planned"),
    ],
)
def test_a_plan_that_would_be_too_large_is_refused(spec: str, tokens: int, told: str) -> None:
    result = plan(prefill=spec, decode=spec, tokens=tokens)

    assert result.exit_code == 2
    assert told in result.stderr
