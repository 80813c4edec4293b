"""A plan's numbers are those that one gets by hand."""

from typing import Any

import pytest

from tests.planning.planning import SMALL, planned

TOKEN_BYTES = 2 * 2 * 8 * 4 * 2  # layers, parts, heads, dims and their bytes
WIDE = "kv_heads=8,head=128,layers=32"
LARGE = "kv_heads=8,head=1024,layers=2"
Figures = dict[str, Any]


@pytest.mark.parametrize(
    ("decode", "tokens", "options", "wanted"),
    [
        # layers * blocks; one box
        (SMALL, 32, "", {"direct": 4, "packed": 1, "chosen": "direct"}),
        (SMALL, 32, "--contiguous", {"direct": 2}),
        # ranks * layers * parts * tokens; a box for each share
        (f"tp=2,{SMALL}", 32, "", {"direct": 256, "packed": 2}),
        (f"layout=HND,{WIDE}", 131_072, "", {"direct": 32 * 2 * 8 * 131_072}),
        (SMALL, 40, "--first-token 20", {"direct": 2 * 2 * 2}),  # each block in part
        (SMALL, 7, "--first-token 7", {"direct": 0, "packed": None}),
        (LARGE, 9, "--slot-bytes 4096", {"packed": None}),  # no box fits
    ],
    ids=["equal", "in-order", "tp", "many", "prefix", "nothing", "no-slot"],
)
def test_each_path_reads_so_many_pieces(
    decode: str, tokens: int, options: str, wanted: Figures
) -> None:
    prefill = WIDE if WIDE in decode else LARGE if decode == LARGE else SMALL
    sides: Figures = {"prefill": prefill, "decode": decode, "tokens": tokens}

    found = planned(*options.split(), **sides)

    assert found == planned(*options.split(), **sides)
    paths = {name: path and path["descriptors"] for name, path in found["paths"].items()}
    assert wanted.items() <= {**paths, "chosen": found["choice"]}.items()


@pytest.mark.parametrize(
    ("prefill", "decode", "reads"),
    [
        (SMALL, f"tp=2,{SMALL}", [(0, 0, [0, 4], [0, 1]), (0, 1, [4, 8], [0, 1])]),
        (f"pp=2,{SMALL}", SMALL, [(0, 0, [0, 8], [0]), (1, 0, [0, 8], [1])]),
        (
            f"tp=16,{SMALL}",
            SMALL,
            [(2 * head, 0, [head, head + 1], [0, 1]) for head in range(8)],
        ),
    ],
    ids=["tp", "stages", "replicas"],
)
def test_who_reads_what_from_whom(prefill: str, decode: str, reads: list[Any]) -> None:
    found = planned(prefill=prefill, decode=decode)

    keys = ("prefill_rank", "decode_rank", "heads", "layers")
    assert [tuple(read[key] for key in keys) for read in found["reads"]] == reads
    assert found["bytes"] == sum(read["bytes"] for read in found["reads"]) == 32 * TOKEN_BYTES
    assert found["unread_ranks"] == [*range(1, 16, 2)] * ("tp=16" in prefill)


def test_a_prefix_is_not_read() -> None:
    found = planned("--first-token", "20", tokens=40)

    assert found["bytes"] == 20 * TOKEN_BYTES
    assert {path["bytes"] for path in found["paths"].values() if path} == {found["bytes"]}
