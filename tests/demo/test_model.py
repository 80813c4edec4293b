"""The demo's transformer: its output depends on the whole prompt, and not on where its KV lies.

Axes: block, slot (of a block), token, head, dim; layer; kv (K, then V).
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.demo.messages import Step
from kvbus.demo.model import Generation, Transformer, generate_alone, one_thread
from kvbus.demo.model_config import Attention, ModelConfig
from kvbus.demo.paged_cache import LayerViews, PagedKV
from kvbus.demo.prompts import encode
from kvbus.geometry import KvPart, held_heads
from tests.demo.caches import last_step, poisoned, tables

PROMPT = encode("The prefill engine reads the prompt once; the decode engine never does. " * 2)
NUM_STEPS = 8
SMALL = ModelConfig(num_layers=2, head_dim=16, hidden=64, intermediate=96)
SMALL_PROMPT = PROMPT[:37]
KINDS = {
    "gqa": {},
    "mla": {"attention": Attention.MLA},
    "window": {"window": 20},
    "mla-window": {"attention": Attention.MLA, "window": 20},
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return Transformer(ModelConfig(**request.param))


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def small(request: pytest.FixtureRequest) -> Transformer:
    return Transformer(replace(SMALL, latent_dim=24, **request.param))


def generate(
    model: Transformer, kv: PagedKV, block_ids: list[int], tokens_per_pass: int | None = None
) -> list[Step]:
    """Like `generate_alone`, in a given cache."""
    generation = Generation(model, kv, tables(model.config, block_ids))
    first = last_step(generation, SMALL_PROMPT, tokens_per_pass)
    return [first, *generation.decode(first.token, len(SMALL_PROMPT), NUM_STEPS - 1)]


@pytest.mark.parametrize("position", [0, 40, len(PROMPT) - 1])
def test_output_depends_on_every_byte_of_the_prompt(model: Transformer, position: int) -> None:
    changed = list(PROMPT)
    changed[position] ^= 1

    steps = generate_alone(model, PROMPT, NUM_STEPS)
    others = generate_alone(model, changed, NUM_STEPS)

    assert [step.token for step in steps] != [step.token for step in others]
    assert all(a.digest != b.digest for a, b in zip(steps, others, strict=True))


def test_output_depends_on_the_order_of_the_prompt(model: Transformer) -> None:
    swapped = [PROMPT[1], PROMPT[0], *PROMPT[2:]]

    assert generate_alone(model, PROMPT, 1) != generate_alone(model, swapped, 1)


def test_output_does_not_repeat_one_token(model: Transformer) -> None:
    tokens = [step.token for step in generate_alone(model, PROMPT, 24)]

    assert len(set(tokens)) > 12


def test_the_same_seed_gives_the_same_output_and_another_seed_another() -> None:
    steps = [
        generate_alone(
            Transformer(ModelConfig(num_layers=2, hidden=64, intermediate=96, seed=seed)), PROMPT, 4
        )
        for seed in (7, 7, 8)
    ]

    assert steps[0] == steps[1]
    assert steps[0] != steps[2]


@settings(max_examples=20, deadline=None)
@given(random=st.randoms(use_true_random=False), block_size=st.integers(1, 20))
def test_output_is_bitwise_the_same_whatever_the_block_ids_order_and_size(
    small: Transformer, random: object, block_size: int
) -> None:
    num_blocks = 60
    block_ids = list(range(num_blocks))
    random.shuffle(block_ids)  # type: ignore[attr-defined]  # hypothesis names no public type
    kv = poisoned(PagedKV.private(small.config, num_blocks=num_blocks, block_size=block_size))
    needed = -(-(len(SMALL_PROMPT) + NUM_STEPS) // block_size)

    steps = generate(small, kv, block_ids[:needed])

    assert steps == generate_alone(small, SMALL_PROMPT, NUM_STEPS)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 2), (4, 1), (5, 2), (6, 1), (7, 1), (8, 2)])
def test_output_is_bitwise_the_same_whatever_the_tensor_and_pipeline_parallelism(
    small: Transformer, tp: int, pp: int
) -> None:
    kv = poisoned(PagedKV.private(small.config, num_blocks=3, block_size=16, tp=tp, pp=pp))

    steps = generate(small, kv, [1, 2, 0])

    assert steps == generate_alone(small, SMALL_PROMPT, NUM_STEPS)


NUM_BLOCKS, BLOCK_SIZE = 16, 4
DTYPE = torch.bfloat16
GQA = Transformer(SMALL)
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
            "layer": SMALL.num_layers,
            "kv": 2,
            "block": NUM_BLOCKS,
            "slot": BLOCK_SIZE,
            "head": len(held_heads(rank, tp, SMALL.kv_heads)),
            "dim": SMALL.head_dim,
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


@pytest.mark.parametrize("offset_bytes", [0, 2])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("order", STORAGE_ORDERS, ids=STORAGE_ORDERS.values())
def test_output_is_bitwise_the_same_whatever_the_strides(
    order: str, tp: int, offset_bytes: int
) -> None:
    kv = poisoned(strided(order, tp, offset_bytes))

    steps = generate(GQA, kv, [14, 3, 8, 0, 1, 15, 9, 10, 2, 7, 6, 12])

    assert steps == generate_alone(GQA, SMALL_PROMPT, NUM_STEPS)


@settings(max_examples=15, deadline=None)
@given(tokens_per_pass=st.integers(1, len(SMALL_PROMPT) + 1))
def test_chunked_prefill_equals_whole_prefill(small: Transformer, tokens_per_pass: int) -> None:
    whole, chunked = (
        poisoned(PagedKV.private(small.config, num_blocks=3, block_size=16)) for _ in range(2)
    )
    at = tables(small.config, [2, 0, 1])

    expected = small.logits(SMALL_PROMPT, whole, at)
    for start in range(0, len(SMALL_PROMPT), tokens_per_pass):
        part = SMALL_PROMPT[start : start + tokens_per_pass]
        logits = small.logits(part, chunked, at, start=start)

    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_prefill_passes_give_the_steps_of_the_reference_with_the_same_passes(
    small: Transformer,
) -> None:
    kv = PagedKV.private(small.config, num_blocks=3, block_size=16)

    steps = generate(small, kv, [2, 1, 0], tokens_per_pass=10)

    assert steps == generate_alone(small, SMALL_PROMPT, NUM_STEPS, tokens_per_pass=10)


def test_a_second_request_in_the_same_cache_changes_nothing(small: Transformer) -> None:
    kv = PagedKV.private(small.config, num_blocks=24, block_size=4)
    mine, others = (
        Generation(small, kv, tables(small.config, range(first, 24, 2))) for first in (0, 1)
    )
    first = last_step(mine, SMALL_PROMPT)
    last_step(others, PROMPT[40:80])

    steps = mine.decode(first.token, len(SMALL_PROMPT), NUM_STEPS - 1)

    assert [first, *steps] == generate_alone(small, SMALL_PROMPT, NUM_STEPS)


def test_it_computes_on_one_thread_whatever_the_process_uses() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_thread():
            inside = torch.get_num_threads()
        with pytest.raises(ZeroDivisionError), one_thread():
            _ = 1 / 0
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)

    assert (inside, after) == (1, 2)


def test_output_does_not_depend_on_the_number_of_threads_and_leaves_it_alone(
    model: Transformer,
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        on_two = generate_alone(model, PROMPT, 2)
        threads_after = torch.get_num_threads()
        torch.set_num_threads(1)
        on_one = generate_alone(model, PROMPT, 2)
    finally:
        torch.set_num_threads(before)

    assert on_two == on_one
    assert threads_after == 2
