"""Engines of any two shapes hand over on each path, and every byte is right.

`tests/unit/planning` compares the plans of many more shapes.
"""

from collections.abc import Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import msgspec
import pytest

from kvbus.geometry import GroupSpec, KvLayout, KvPart
from tests.process.handoffs.shapes import (
    DEEP,
    FEW_HEADS,
    GROUP,
    LATENT,
    PATHS,
    STATE,
    WINDOW,
    ShapedAgents,
    Side,
    two_engines,
)
from tests.support.engines import hand_over
from tests.support.expected import num_pieces_compared
from tests.support.memories import Memory

pytestmark = pytest.mark.anyio

MAX_TOKENS, MAX_RANKS = 100, 8
NUM_TRIES = 200
Case = dict[str, Any]
"""A value by axis."""
ROLES = ("prefill", "decode")
INTERLEAVED = (
    GroupSpec("full", (0, 2, 4), 6, 3, 2, "bfloat16"),
    GroupSpec("latent", (1, 3, 5), 4, 1, 5, "bfloat16", (KvPart.LATENT,)),
)
MODELS: dict[str, tuple[GroupSpec, ...]] = {
    "full": (GROUP,),
    "few heads": (FEW_HEADS,),
    "latent": (LATENT,),
    "deep": (DEEP,),
    "window": (GROUP, WINDOW),
    "state": (GROUP, WINDOW, STATE),
    "interleaved": INTERLEAVED,
}
ONE_PLACE = ("apart", "padded")
"""Tensors that are not made for ranks at several agents."""
ALONE, SEVERAL, RING, UNREGISTERED = "one agent", "two agents", "a ring", "unregistered"
REQUESTS: dict[str, dict[str, Any]] = {
    "whole": {"num_tokens": 71},
    "behind a prefix": {"num_tokens": 71, "first_token": 37},
    "part of an offer": {"num_tokens": 64, "offered": 90},
    "tails alone": {"num_tokens": 90, "only_tails": True},
    "in steps": {"num_tokens": 71, "first_token": 5, "steps": (0, 25, 26, 55)},
    "nothing": {"num_tokens": 71, "first_token": 71},
}
OF_A_SIDE: dict[str, Sequence[Any]] = {
    "tp": (1, 2, 3, 4, 8),
    "pp": (1, 2, 3),
    "block_size": (1, 6, 16, 48, 64),
    "layout": (
        "NHD",
        "HND",
        "cross-layer NHD",
        "dim,token,block,head,kv",
        "head,block,token,layer,dim,kv",
    ),
    "tensors": ("plain", "apart", "padded"),
    "memory": (ALONE, SEVERAL, RING, UNREGISTERED),
}
AXES: dict[str, Sequence[Any]] = {
    "path": PATHS,
    "model": tuple(MODELS),
    "dtype": ("bfloat16", "float32", "float16", "float8_e4m3fn", "int8"),
    **{f"prefill {name}": values for name, values in OF_A_SIDE.items()},
    **{f"decode {name}": values for name, values in OF_A_SIDE.items()},
    "request": tuple(REQUESTS),
    "zero_tail": (False, True),
}


def is_possible(case: Case) -> bool:
    """Whether there are such engines, and they can take this path; of a few axes, whether some."""
    unregistered = [role for role in ROLES if case.get(f"{role} memory") == UNREGISTERED]
    path = case.get("path")
    if path == "direct" and unregistered:
        return False
    if path == "staged" and "prefill" in unregistered:
        return False
    if case.get("model") == "state" and case.get("request") == "part of an offer":
        return False  # a state is that of the last token
    return all(_is_side(case, role) for role in ROLES)


def _is_side(case: Case, role: str) -> bool:
    tp, pp, tensors = (case.get(f"{role} {name}") for name in ("tp", "pp", "tensors"))
    num_layers = sum(len(group.layers) for group in MODELS[case.get("model", "deep")])
    if case.get(f"{role} memory") == SEVERAL and ((tp, pp) == (1, 1) or tensors in ONE_PLACE):
        return False
    return (tp or 1) * (pp or 1) <= MAX_RANKS and (pp or 1) <= num_layers


def pairwise_cases(seed: int) -> list[Case]:
    """Few cases that contain each possible pair of values: most defects need two."""
    random, cases = Random(seed), list[Case]()
    missing = {
        pair: None  # in the same order in all processes
        for (one, ones), (other, others) in combinations(AXES.items(), 2)
        for pair in product(product([one], ones), product([other], others))
        if is_possible(dict(pair))
    }
    while missing:
        wanted = dict(next(iter(missing)))
        drawn = [
            {name: random.choice(values) for name, values in AXES.items()} | wanted
            for _ in range(NUM_TRIES)
        ]
        best = max(filter(is_possible, drawn), key=lambda case: len(_pairs(case) & missing.keys()))
        for pair in _pairs(best) & missing.keys():
            del missing[pair]
        cases.append(best)
    return cases


def _pairs(case: Case) -> set[Any]:
    return set(combinations(case.items(), 2))


def side_of(case: Case, role: str) -> Side:
    told = {name: case[f"{role} {name}"] for name in OF_A_SIDE}
    layout = told["layout"].removeprefix("cross-layer ")
    memory = Memory(
        KvLayout.parse(layout, cross_layer=layout != told["layout"]),
        apart=told["tensors"] == "apart",
        padding=2 if told["tensors"] == "padded" else 0,
        direct=told["memory"] != UNREGISTERED,
    )
    num_ranks = told["tp"] * told["pp"]
    places = ("01" * num_ranks)[:num_ranks] if told["memory"] == SEVERAL else ""
    return Side(told["tp"], told["pp"], told["block_size"], memory, told["memory"] == RING, places)


CASES = pairwise_cases(seed=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{CASES.index(case)}-{case['path']}")
async def test_engines_of_any_two_shapes_hand_over(shapes: ShapedAgents, case: Case) -> None:
    await check_handovers(shapes, case)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
async def test_engines_of_many_more_shapes_hand_over(shapes: ShapedAgents, seed: int) -> None:
    for case in pairwise_cases(seed):
        try:
            await check_handovers(shapes, case)
        except Exception as error:
            error.add_note(str(case))
            raise


async def check_handovers(shapes: ShapedAgents, case: Case) -> None:
    path = case["path"]
    sides = [side_of(case, role) for role in ROLES]
    first, *others = MODELS[case["model"]]
    groups = [msgspec.structs.replace(first, dtype=case["dtype"]), *others]
    before = num_compared(shapes, path)
    async with two_engines(shapes, path, *sides, groups=groups, max_tokens=MAX_TOKENS) as engines:
        request = {**REQUESTS[case["request"]], "zero_tail": case["zero_tail"]}
        fetched = await hand_over(*engines, **request)
        pieces = num_pieces_compared(*engines, request["num_tokens"], request.get("first_token", 0))
        assert fetched.path == (path if fetched.num_bytes else "")
        compared = num_compared(shapes, path) - before
        assert compared >= pieces if "steps" in request else compared == pieces
        await hand_over(*engines, 96, first_token=13)


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_may_begin_and_end_anywhere_in_a_block(
    shapes: ShapedAgents, path: str
) -> None:
    prefill = Side(tp=2, block_size=48)
    decode = Side(tp=3, block_size=32, memory=Memory(KvLayout.parse("HND")))
    edges = [0, 1, 31, 32, 33, 47, 48, 49]
    async with two_engines(shapes, path, prefill, decode) as engines:
        for num_tokens in edges:
            await hand_over(*engines, num_tokens)
            await hand_over(*engines, num_tokens, zero_tail=True)
        for first_token in (*edges, 70, 71):
            await hand_over(*engines, 71, first_token=first_token, zero_tail=True)


async def test_fetch_after_fetch_another_replica_is_read(shapes: ShapedAgents) -> None:
    async with two_engines(shapes, "direct", Side(tp=4), Side(), groups=[LATENT]) as engines:
        source, target = engines
        read = []
        for _ in range(4):
            for rank in range(4):  # replicas that differ show by their bits which one was read
                source.views()[rank, 0, "latent"].fill_(rank)
            offer = await source.prefill.offer("r", num_tokens=16, block_ids={"latent": [1]})
            fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"latent": [2]})
            await fetch.ended
            await offer.ended
            read.append(set(target.views()[0, 0, "latent"][2].flatten().tolist()))
        assert all(len(holders) == 1 for holders in read)
        assert set.union(*read) == {0, 1, 2, 3}


def num_compared(shapes: ShapedAgents, path: str) -> float:
    return sum(agent.metric("digests_total", outcome="equal") for agent in shapes.of(path))
