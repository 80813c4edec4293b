"""``kvbus plan`` on the command line: what it prints, and what it refuses."""

from typing import Any

import pytest

from tests.unit.planning.planning import SMALL, plan, planned, refused

PLAN_KEYS = {
    *("from", "to", "tokens", "bytes", "reads", "unread_ranks", "paths"),
    *("choice", "reason", "seconds", "slot_bytes"),
}
PATH_KEYS = {"descriptors", "bytes", "scattered_bytes", "tiles"}
Sides = dict[str, Any]

HALVES: Sides = {"decode": f"tp=2,{SMALL}", "tokens": 2048}
ALIKE = "packed reads what several decode ranks hold alike once: 512 KiB for 2 MiB"
MANY: Sides = {"prefill": f"tp=8,{SMALL}", "decode": f"tp=64,{SMALL}"}


@pytest.mark.parametrize(
    ("arguments", "sides", "told"),
    [
        ([], HALVES, ["0 1 attention 0-1 4-7 ", "direct 16,384 ", "packed: runs are under 8 KiB"]),
        (["--same-machine"], HALVES, ["copied from"]),
        ([], {**HALVES, "decode": f"tp=32,{SMALL}"}, [ALIKE]),
        ([], MANY, ["and 24 more: --json has them all"]),
    ],
    ids=["usual", "copied from", "alike", "many"],
)
def test_the_tables_say_who_reads_what_and_why_so(
    arguments: list[str], sides: Sides, told: list[str]
) -> None:
    shown = plan(*arguments, **sides).stdout
    words = " ".join(shown.split())
    assert all(text in words for text in told)
    assert ("copied from" in words) == ("--same-machine" in arguments)
    assert ("alike" in words) == (sides is not HALVES)
    assert max(map(len, shown.splitlines())) <= 80


def test_the_json_is_the_last_line_and_its_keys_stay() -> None:
    found = planned(decode=f"tp=2,{SMALL}")
    assert set(found) == PLAN_KEYS
    assert set(found["from"]) == {"engine", "axes"}
    assert set(found["paths"]) == {"direct", "staged", "packed", "mapped"}
    assert found["paths"].pop("mapped") is None
    assert all(set(path) == PATH_KEYS for path in found["paths"].values())
    place = {"group": "attention", "layers": [0, 1], "parts": ["k", "v"], "heads": [4, 8]}
    ranks = {"prefill_rank": 0, "decode_rank": 1, "positions": [0, 32], "bytes": 4096}
    assert found["reads"][1] == place | ranks
    assert (found["tokens"], found["bytes"]) == ([0, 32], 8192)


WIDE = "kv_heads=8,head=128,layers=4"
LARGE = "kv_heads=8,head=1024,layers=2"


@pytest.mark.parametrize(
    ("arguments", "engines", "tokens", "path", "why"),
    [
        ([], (WIDE, WIDE), 4096, "direct", "runs have 8 KiB or more"),
        ([], (WIDE, f"tp=2,{WIDE}"), 64, "staged", "runs are under 8 KiB, blocks have longer ones"),
        ([], (f"block=1,{WIDE}", f"tp=2,{WIDE}"), 64, "packed", "runs are under 8 KiB"),
        ([], (SMALL, SMALL), 64, "direct", "it is so little"),
        ([], 2 * (f"tp=16,{WIDE}",), 4096, "staged", "several decode ranks read the same"),
        (
            *([], 2 * (f"tp=16,block=4,{WIDE}",), 4096),
            "packed",
            "several decode ranks read the same",
        ),
        (["--same-machine"], (SMALL, SMALL), 32, "mapped", "memory that is mapped is copied once"),
        (["--slot-bytes", "4096"], (LARGE, f"tp=4,{LARGE}"), 70, "direct", "slots are too small"),
    ],
)
def test_the_rule_is_named(
    arguments: list[str], engines: tuple[str, str], tokens: int, path: str, why: str
) -> None:
    prefill, decode = engines
    found = planned(*arguments, prefill=prefill, decode=decode, tokens=tokens)
    assert (found["choice"], found["reason"]) == (path, why)
    assert set(found["paths"][path]) == PATH_KEYS
    assert found["seconds"] == 1e-3 + found["paths"][path]["bytes"] / 8e9


MANY_BLOCKS: Sides = dict.fromkeys(("prefill", "decode"), f"block=1,{SMALL}")
HUGE: Sides = dict.fromkeys(("prefill", "decode"), "kv_heads=4096,head=65536,layers=512,dtype=f32")


@pytest.mark.parametrize(
    ("arguments", "sides", "told"),
    [
        ("--first-token 33", {}, "--first-token: 33 is more than --tokens 32"),
        ("", {**MANY_BLOCKS, "tokens": 1 << 24}, "--tokens: 16777216 tokens are 16777216 blocks"),
        ("", {**HUGE, "tokens": 1 << 20}, "--from, --to: a rank would have"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: str, sides: Sides, told: str) -> None:
    assert told in refused(*arguments.split(), **sides)


def test_engines_differing_beyond_shape_end_with_status_1() -> None:
    fewer_heads = SMALL.replace("kv_heads=8", "kv_heads=4")
    assert "num_kv_heads: prefill has 8, decode has 4" in refused(status=1, decode=fewer_heads)


TOKEN_BYTES = 2 * 2 * 8 * 4 * 2  # layers, parts, heads, dims and their bytes
MANY_LAYERS = "kv_heads=8,head=128,layers=32"


@pytest.mark.parametrize(
    ("decode", "tokens", "options", "wanted"),
    [
        # layers * blocks; one tile
        (SMALL, 32, "", {"direct": 4, "packed": 1, "chosen": "direct"}),
        # ranks * layers * parts * tokens; a tile for each share
        (f"tp=2,{SMALL}", 32, "", {"direct": 256, "packed": 2}),
        (f"layout=HND,{MANY_LAYERS}", 131_072, "", {"direct": 32 * 2 * 8 * 131_072}),
        (SMALL, 40, "--first-token 20", {"direct": 2 * 2 * 2}),  # each block in part
        (SMALL, 7, "--first-token 7", {"direct": 0, "packed": None}),
        (LARGE, 9, "--slot-bytes 4096", {"packed": None}),  # no tile fits
    ],
    ids=["equal", "tp", "many", "prefix", "nothing", "no-slot"],
)
def test_pieces_that_each_path_reads(decode: str, tokens: int, options: str, wanted: Sides) -> None:
    prefill = MANY_LAYERS if MANY_LAYERS in decode else LARGE if decode == LARGE else SMALL
    sides: Sides = {"prefill": prefill, "decode": decode, "tokens": tokens}
    found = planned(*options.split(), **sides)
    assert found == planned(*options.split(), **sides)
    paths = {name: path and path["descriptors"] for name, path in found["paths"].items()}
    assert wanted.items() <= {**paths, "chosen": found["choice"]}.items()


@pytest.mark.parametrize(
    ("prefill", "decode", "reads"),
    [
        (f"pp=2,{SMALL}", SMALL, [(0, 0, [0, 8], [0]), (1, 0, [0, 8], [1])]),
        (f"tp=16,{SMALL}", SMALL, [(2 * head, 0, [head, head + 1], [0, 1]) for head in range(8)]),
    ],
    ids=["stages", "replicas"],
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
