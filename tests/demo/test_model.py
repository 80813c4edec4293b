"""The demo's transformer: its output depends on the whole prompt, and not on where its KV lies.

Axes: block, slot (of a block), token, head, dim; layer; kv (K, then V).
"""

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.demo.model import Transformer, generate_alone, greedy, one_thread
from kvbus.demo.model_config import MAX_KV_HEADS, MAX_TP, ModelConfig
from kvbus.demo.paged_cache import LayerViews, PagedKV, slots
from kvbus.geometry import KvPart, held_heads
from tests.demo.caches import KINDS, NUM_STEPS, PROMPT, SMALL, CachedRequest, poisoned, tables
from tests.examples import num_examples

NUM_FLIPS = 24


@pytest.fixture(scope="module", params=KINDS.values(), ids=[*KINDS])
def model(request: pytest.FixtureRequest) -> Transformer:
    return Transformer(replace(SMALL, **request.param))


@pytest.fixture(scope="module")
def alone(model: Transformer) -> list[Any]:
    return generate_alone(model, PROMPT, 1 + NUM_STEPS)


@pytest.mark.parametrize("change", ["first", "middle", "last", "order"])
def test_output_depends_on_every_byte_of_the_prompt_and_their_order(
    model: Transformer, alone: list[Any], change: str
) -> None:
    changed = list(PROMPT)
    if change == "order":
        changed[:2] = changed[1::-1]
    else:
        changed[{"first": 0, "middle": 40, "last": -1}[change]] ^= 1

    steps = generate_alone(model, changed, 1 + NUM_STEPS)

    assert all(a.digest != b.digest for a, b in zip(steps, alone, strict=True))


def test_output_does_not_repeat_one_token_and_is_that_of_the_seed() -> None:
    tokens = [step.token for step in generate_alone(Transformer(ModelConfig()), PROMPT, 24)]
    first, same, other = (
        generate_alone(Transformer(replace(SMALL, seed=seed)), PROMPT, 2) for seed in (7, 7, 8)
    )

    assert len(set(tokens)) > 12
    assert first == same
    assert first != other


def test_the_model_has_a_query_head_for_each_rank_whatever_its_kv_heads() -> None:
    models = [ModelConfig(kv_heads=heads) for heads in range(1, MAX_KV_HEADS + 1)]

    assert min(model.num_query_heads for model in models) == MAX_TP
    assert [model.num_query_heads % model.kv_heads for model in models] == [0] * MAX_KV_HEADS


@settings(max_examples=num_examples(80))
@given(
    random=st.randoms(use_true_random=False),
    block_size=st.integers(1, 40),
    ranks=st.tuples(st.integers(1, 8), st.integers(1, 4)),
)
def test_output_is_bitwise_the_same_whatever_the_blocks_and_the_parallelism(
    model: Transformer, alone: list[Any], random: Random, block_size: int, ranks: tuple[int, int]
) -> None:
    needed = -(-(len(PROMPT) + NUM_STEPS) // block_size)
    block_ids = random.sample(range(needed + 5), needed)

    steps = CachedRequest.of(model, block_ids, block_size, tp=ranks[0], pp=ranks[1]).generate()

    assert steps == alone


LAYERED = replace(SMALL, num_layers=2)
NUM_BLOCKS, BLOCK_SIZE = 20, 4
DTYPE = torch.bfloat16
# Name of the storage's axes → how [block, slot, head, dim] of a layer's K or V is read from it.
STORAGE_ORDERS = {
    "layer kv block slot head dim": "NHD",
    "layer kv block head slot dim": "HND",
    "layer block kv slot head dim": "K and V in one block",
    "layer block slot head dim kv": "K and V element by element",
    "block layer kv head slot dim": "cross-layer blocks",
    "kv dim slot block head layer": "no order that anyone would choose",
}


def strided(order: str, tp: int, offset_bytes: int) -> PagedKV:
    """A cache of one storage a rank, in memory that torch did not allocate."""

    def views_of(rank: int) -> dict[int, LayerViews]:
        sizes = {
            "layer": LAYERED.num_layers,
            "kv": 2,
            "block": NUM_BLOCKS,
            "slot": BLOCK_SIZE,
            "head": len(held_heads(rank, tp, LAYERED.kv_heads)),
            "dim": LAYERED.head_dim,
        }
        axes = order.split()
        num_elements = math.prod(sizes.values())
        memory = bytearray(num_elements * DTYPE.itemsize + offset_bytes)
        storage = torch.frombuffer(memory, dtype=DTYPE, offset=offset_bytes)
        view = storage.view([sizes[axis] for axis in axes]).permute(
            [axes.index(axis) for axis in ("layer", "kv", "block", "slot", "head", "dim")]
        )
        return {
            number: {KvPart.KEY: layer[0], KvPart.VALUE: layer[1]}
            for number, layer in enumerate(view)
        }

    return PagedKV([views_of(rank) for rank in range(tp)])


@pytest.mark.parametrize(("tp", "offset_bytes"), [(1, 0), (4, 2)])
@pytest.mark.parametrize("order", STORAGE_ORDERS, ids=STORAGE_ORDERS.values())
def test_output_is_bitwise_the_same_whatever_the_strides(
    order: str, tp: int, offset_bytes: int
) -> None:
    model = Transformer(LAYERED)
    kv = poisoned(strided(order, tp, offset_bytes))
    block_ids = Random(1).sample(range(NUM_BLOCKS), NUM_BLOCKS)

    steps = CachedRequest(model, kv, block_ids, BLOCK_SIZE).generate()

    assert steps == generate_alone(model, PROMPT, 1 + NUM_STEPS)


@settings(max_examples=num_examples(60))
@given(tokens_per_pass=st.integers(1, len(PROMPT) + 1))
def test_chunked_prefill_equals_whole_prefill(model: Transformer, tokens_per_pass: int) -> None:
    whole, chunked = (CachedRequest.of(model, range(5)) for _ in range(2))
    at = tables(model, range(5))

    expected = model.logits(PROMPT, whole.kv, at)
    for start in range(0, len(PROMPT), tokens_per_pass):
        part = PROMPT[start : start + tokens_per_pass]
        logits = model.logits(part, chunked.kv, at, start=start)
    steps = CachedRequest.of(model, range(6)).generate(tokens_per_pass)

    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert steps == generate_alone(model, PROMPT, 1 + NUM_STEPS, tokens_per_pass=tokens_per_pass)


def test_a_second_request_in_the_same_cache_changes_nothing(
    model: Transformer, alone: list[Any]
) -> None:
    mine = CachedRequest.of(model, range(1, 12, 2))
    others = CachedRequest(model, mine.kv, range(0, 12, 2), mine.block_size)

    first = mine.prefill(PROMPT)
    others.prefill(PROMPT[::-1])

    assert [first, *mine.decode(first, PROMPT)] == alone


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tp", "byte"), [(1, "lowest"), (8, "lowest"), (8, "highest")])
def test_one_flipped_bit_of_any_used_slot_changes_the_digests(
    model: Transformer, kv_dtype: str, tp: int, byte: str
) -> None:
    """On 8 ranks each of the 4 KV heads is held twice, a latent 8 times: each replica counts."""
    config = replace(model.config, kv_dtype=kv_dtype)
    engine = CachedRequest.of(Transformer(config), [4, 2, 5, 0, 3], tp=tp)
    first = engine.prefill(PROMPT)
    expected, random = engine.decode(first, PROMPT), Random(3)
    at = tables(engine.model, engine.block_ids)

    unnoticed = []
    for _ in range(NUM_FLIPS):
        rank, layer = random.randrange(tp), random.randrange(config.num_layers)
        view = engine.kv.views[rank][layer][random.choice(config.parts)]
        window = config.window_of(layer) or len(PROMPT)
        position = random.randrange(len(PROMPT) - window + 1, len(PROMPT))
        block, slot = slots(at[config.group_of(layer)], view, position, position + 1)
        head, element = random.randrange(view.shape[2]), random.randrange(view.shape[3])
        where = (int(block), int(slot), head, 2 * element + (byte == "highest"))
        view.view(torch.uint8)[where] ^= 1
        if engine.decode(first, PROMPT) == expected:
            unnoticed.append((rank, layer, where))
        view.view(torch.uint8)[where] ^= 1

    assert unnoticed == []


def test_what_is_behind_the_last_token_or_was_left_behind_by_a_window_changes_nothing(
    model: Transformer, alone: list[Any]
) -> None:
    """A request's own decode reads no position that its fetch did not ask for."""
    engine = CachedRequest.of(model, [4, 2, 5, 0, 3])
    first = engine.prefill(PROMPT)
    last = (len(PROMPT) + NUM_STEPS, 5 * engine.block_size)

    for layer, parts in engine.kv.views[0].items():
        window = model.config.window_of(layer) or len(PROMPT) + 1
        for span in (last, (0, max(0, len(PROMPT) - window + 1))):
            for view in parts.values():
                table = tables(model, engine.block_ids)[model.config.group_of(layer)]
                view[slots(table, view, *span)] = math.nan

    assert [first, *engine.decode(first, PROMPT)] == alone


def test_a_digest_tells_logits_apart_that_choose_the_same_token() -> None:
    logits = torch.tensor([0.5, 2.0, 1.0])
    nudged = torch.nextafter(logits, torch.full_like(logits, 9.0))

    assert greedy(logits).token == greedy(nudged).token == 1
    assert greedy(logits).digest != greedy(nudged).digest


def test_output_does_not_depend_on_the_number_of_threads_and_leaves_it_alone(
    model: Transformer, alone: list[Any]
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_thread():
            inside = torch.get_num_threads()
        with pytest.raises(ZeroDivisionError), one_thread():
            _ = 1 / 0
        steps = generate_alone(model, PROMPT, 1 + NUM_STEPS)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)

    assert (inside, after) == (1, 2)
    assert steps == alone
