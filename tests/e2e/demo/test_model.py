"""The demo's transformer: its output depends on the whole prompt, and not on where its KV is."""

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.demo.model import Generation, PagedKV, Transformer, generate_alone, greedy
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.spec_text import ModelFields, read_fields
from tests.support.examples import num_examples

KINDS = {"gqa": "kv_heads=4 head=16", "mla-window": "attention=mla head=24 window=20"}
PROMPT = list(b"Every byte of this prompt has a say in what comes after it, in every layer.")
NUM_STEPS = 4


def spec_of(kind: str, *words: str) -> EngineSpec:
    text = " ".join((KINDS[kind], "layers=4", f"model={kind}", *words))
    return read_fields("model", text, ModelFields).engine("alone")


def small(kind: str, *words: str, seed: int = 0) -> Transformer:
    return Transformer(spec_of(kind, *words), seed, hidden=64, intermediate=96, head_dim=16)


class Request:
    """A cache full of NaN, so that a read of a slot never written shows, and its blocks there."""

    def __init__(self, model: Transformer, block_ids: Sequence[int], *words: str) -> None:
        spec = spec_of(model.spec.model, *words)
        self.model = model
        self.kv = PagedKV.private(spec, max(block_ids) + 1)
        for parts in (parts for rank in self.kv.views for parts in rank.values()):
            for view in parts.values():
                view.fill_(math.nan)
        self.tables = {one.name: BlockTable.of(list(block_ids)) for one in spec.groups}
        self.generation = Generation(model, self.kv, self.tables)

    def prefill(self, prompt: list[int] = PROMPT, tokens_per_pass: int | None = None) -> Any:
        *_, (_, logits) = self.generation.prefill(prompt, tokens_per_pass)
        return greedy(logits)

    def decode(self, first: Any) -> list[Any]:
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


@settings(max_examples=num_examples(30))
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


@settings(max_examples=num_examples(20))
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


@pytest.mark.parametrize("kind", KINDS)
def test_all_tensors_of_a_model_are_on_its_device(kind: str) -> None:
    spec = spec_of(kind)
    model = Transformer(spec, device="meta", hidden=64, intermediate=96, head_dim=16)
    tables = {group.name: BlockTable.of(range(6)) for group in spec.groups}

    kv = PagedKV.private(spec, 6).on(model.device)
    logits = model.logits(PROMPT, kv, tables), model.logits([1], kv, tables, start=len(PROMPT))

    assert {one.device for one in logits} == {torch.device("meta")}


def test_the_decoder_computes_all_tokens_after_the_first(
    model: Transformer, alone: list[Any]
) -> None:
    other = small(model.spec.model, seed=1)

    first, *rest = generate_alone(model, PROMPT, 1 + NUM_STEPS, decoder=other)

    assert first == alone[0]
    assert all(a.digest != b.digest for a, b in zip(rest, alone[1:], strict=True))
    assert generate_alone(model, PROMPT, 1 + NUM_STEPS, decoder=small(model.spec.model)) == alone
