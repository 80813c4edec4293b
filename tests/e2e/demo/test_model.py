"""The demo's transformer: its output depends on the whole prompt, and not on where its KV lies."""

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.demo.model import Generation, PagedKV, Transformer, generate_alone, slots
from kvbus.demo.options import DemoOptions
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.spec_text import ModelWords, read_words
from tests.support.examples import num_examples

KINDS = {
    "gqa": "kv_heads=4 head=16",
    "mla": "attention=mla head=24",
    "window": "kv_heads=4 head=16 window=20",
    "mla-window": "attention=mla head=24 window=20",
}
PROMPT = list(b"Every byte of this prompt has a say in what comes after it, in every layer.")
NUM_STEPS, NUM_FLIPS = 4, 24


def spec_of(kind: str, *words: str) -> EngineSpec:
    """A model is named by its kind."""
    text = " ".join((KINDS[kind], "layers=4", f"model={kind}", *words))
    return read_words("model", text, ModelWords).engine("alone")


def small(kind: str, *words: str, seed: int = 0) -> Transformer:
    return Transformer(spec_of(kind, *words), seed, hidden=64, intermediate=96, head_dim=16)


class Request:
    """A cache full of NaN, so that a read of a slot never written shows, and its blocks there."""

    def __init__(self, model: Transformer, block_ids: Sequence[int], *words: str) -> None:
        spec = spec_of(model.spec.model, *words)
        self.model, self.num_slots = model, len(block_ids) * spec.groups[0].block_size
        self.kv = PagedKV.private(spec, max(block_ids) + 1)
        for parts in (parts for rank in self.kv.views for parts in rank.values()):
            for view in parts.values():
                view.fill_(math.nan)
        self.tables = {one.name: BlockTable.of(list(block_ids)) for one in spec.groups}
        self.generation = Generation(model, self.kv, self.tables)

    def prefill(self, prompt: list[int] = PROMPT, tokens_per_pass: int | None = None) -> Any:
        """The step of the first token, after all passes."""
        *_, (_, step) = self.generation.prefill(prompt, tokens_per_pass)
        return step

    def decode(self, first: Any) -> list[Any]:
        """All steps, the first one among them."""
        return [first, *self.generation.decode(first.token, len(PROMPT), NUM_STEPS)]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return small(request.param)


@pytest.fixture(scope="module")
def alone(model: Transformer) -> list[Any]:
    return generate_alone(model, PROMPT, 1 + NUM_STEPS)


@pytest.mark.parametrize("change", ["first", "middle", "last", "order"])
def test_output_depends_on_every_prompt_byte_and_their_order(
    model: Transformer, alone: list[Any], change: str
) -> None:
    changed = list(PROMPT)
    if change == "order":
        changed[:2] = changed[1::-1]
    else:
        changed[{"first": 0, "middle": 40, "last": -1}[change]] ^= 1

    steps = generate_alone(model, changed, 1 + NUM_STEPS)

    assert all(a.digest != b.digest for a, b in zip(steps, alone, strict=True))


def test_output_repeats_no_single_token_and_follows_its_seed() -> None:
    of_the_demo = Transformer(DemoOptions().spec("alone"), 0)
    tokens = [step.token for step in generate_alone(of_the_demo, PROMPT, 24)]
    first, same, other = (generate_alone(small("gqa", seed=seed), PROMPT, 2) for seed in (7, 7, 8))

    assert len(set(tokens)) > 12
    assert first == same
    assert first != other


@settings(max_examples=num_examples(80))
@given(
    random=st.randoms(use_true_random=False),
    block_size=st.integers(1, 40),
    ranks=st.tuples(st.integers(1, 8), st.integers(1, 4)),
)
def test_output_is_bitwise_same_for_any_blocks_and_parallelism(
    model: Transformer, alone: list[Any], random: Random, block_size: int, ranks: tuple[int, int]
) -> None:
    needed = -(-(len(PROMPT) + NUM_STEPS) // block_size)
    block_ids = random.sample(range(needed + 5), needed)

    request = Request(model, block_ids, f"block={block_size} tp={ranks[0]} pp={ranks[1]}")

    assert request.decode(request.prefill()) == alone


@settings(max_examples=num_examples(60))
@given(tokens_per_pass=st.integers(1, len(PROMPT) + 1))
def test_chunked_prefill_equals_whole_prefill(model: Transformer, tokens_per_pass: int) -> None:
    whole, chunked, request = (Request(model, range(6)) for _ in range(3))

    expected = model.logits(PROMPT, whole.kv, whole.tables)
    for start in range(0, len(PROMPT), tokens_per_pass):
        part = PROMPT[start : start + tokens_per_pass]
        logits = model.logits(part, chunked.kv, chunked.tables, start=start)
    steps = request.decode(request.prefill(PROMPT, tokens_per_pass))

    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert steps == generate_alone(model, PROMPT, 1 + NUM_STEPS, tokens_per_pass=tokens_per_pass)


@pytest.mark.parametrize(
    ("kv_dtype", "tp", "byte"),
    [("bfloat16", 1, "lowest"), ("bfloat16", 8, "highest"), ("float16", 8, "lowest")],
)
def test_one_flipped_bit_of_any_used_slot_changes_the_digests(
    model: Transformer, kv_dtype: str, tp: int, byte: str
) -> None:
    """On 8 ranks each of the 4 KV heads is held twice, a latent 8 times: each replica counts."""
    block_ids = [4, 2, 5, 0, 3]
    engine, random = Request(model, block_ids, f"tp={tp} dtype={kv_dtype}"), Random(3)
    first = engine.prefill()
    expected = engine.decode(first)

    unnoticed = []
    for _ in range(NUM_FLIPS):
        rank, (layer, group) = random.randrange(tp), random.choice([*model.groups.items()])
        view = engine.kv.views[rank][layer][random.choice(group.parts)]
        window = group.window or len(PROMPT)
        position = random.randrange(len(PROMPT) - window + 1, len(PROMPT))
        table = engine.tables[group.name]
        block, slot = slots(table, view, position, position + 1)
        head, element = random.randrange(view.shape[2]), random.randrange(view.shape[3])
        where = (int(block), int(slot), head, 2 * element + (byte == "highest"))
        view.view(torch.uint8)[where] ^= 1
        if engine.decode(first) == expected:
            unnoticed.append((rank, layer, where))
        view.view(torch.uint8)[where] ^= 1

    assert unnoticed == []


def test_slots_after_last_token_or_before_window_change_nothing(
    model: Transformer, alone: list[Any]
) -> None:
    """A request's own decode reads no position that its fetch did not ask for."""
    engine = Request(model, [4, 2, 5, 0, 3])
    first = engine.prefill()
    last = (len(PROMPT) + NUM_STEPS, engine.num_slots)

    for layer, parts in engine.kv.views[0].items():
        group = model.groups[layer]
        window = group.window or len(PROMPT) + 1
        for span in (last, (0, max(0, len(PROMPT) - window + 1))):
            for view in parts.values():
                view[slots(engine.tables[group.name], view, *span)] = math.nan

    assert engine.decode(first) == alone
