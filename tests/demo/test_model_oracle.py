"""The demo's transformer equals an un-paged one that is written from the definitions alone.

Axes: token, dim (of one head), hidden (the residual stream).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbus.demo.model import Transformer, generate_alone
from kvbus.demo.model_config import Attention, ModelConfig
from kvbus.demo.paged_cache import PagedKV
from kvbus.geometry import KvPart
from tests.demo.caches import tables

PROMPT = list(b"The decode engine never reads a prompt")
SMALL = ModelConfig(num_layers=3, head_dim=16, latent_dim=24, hidden=64, intermediate=96)


def oracle_rotated(x: Tensor, theta: float) -> Tensor:
    """RoPE as complex multiplication: [token, dim] → [token, dim]."""
    half = x.shape[1] // 2
    angles = torch.tensor(
        [[t * theta ** (-i / half) for i in range(half)] for t in range(len(x))],
        dtype=torch.float64,
    )
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def oracle_kv(
    x: Tensor, weights: Any, config: ModelConfig, *, query_head: int, part: KvPart
) -> Tensor:
    """K or V of one query head: [token, dim]."""
    if config.attention is Attention.MLA:
        latent = (x @ weights.cached[KvPart.LATENT]).to(getattr(torch, config.kv_dtype)).double()
        kv: Tensor = latent @ weights.raised[part][query_head]
        return kv
    head = query_head // (config.num_query_heads // config.kv_heads)
    columns = slice(head * config.head_dim, (head + 1) * config.head_dim)
    held: Tensor = (
        (x @ weights.cached[part])[:, columns].to(getattr(torch, config.kv_dtype)).double()
    )
    return held


def oracle_attention(x: Tensor, weights: Any, config: ModelConfig, layer: int) -> Tensor:
    dim, outputs = config.head_dim, []
    window = config.window if config.window and layer in (1, 3) else len(x)
    for query_head in range(config.num_query_heads):
        q = (x @ weights.query)[:, query_head * dim :][:, :dim]
        q = oracle_rotated(q, config.rope_theta)
        k = oracle_kv(x, weights, config, query_head=query_head, part=KvPart.KEY)
        k = oracle_rotated(k, config.rope_theta)
        v = oracle_kv(x, weights, config, query_head=query_head, part=KvPart.VALUE)
        rows = []
        for token in range(len(x)):
            seen = [j for j in range(token + 1) if j > token - window]
            weight = torch.exp(k[seen] @ q[token] / dim**0.5)
            rows.append(weight / weight.sum() @ v[seen])
        outputs.append(torch.stack(rows))
    attended: Tensor = torch.cat(outputs, dim=1) @ weights.output
    return attended


def oracle_logits(model: Transformer, tokens: list[int]) -> Tensor:
    def norm(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    x = model.weights.embedding[tokens]
    for layer, weights in enumerate(model.weights.layers):
        x = x + oracle_attention(norm(x), weights, model.config, layer)
        gate, up = norm(x) @ weights.gate, norm(x) @ weights.up
        x = x + (gate * torch.sigmoid(gate) * up) @ weights.down
    return (norm(x) @ model.weights.logits)[-1].float()


@pytest.mark.parametrize(
    ("attention", "window", "kv_dtype"),
    [
        (Attention.GQA, None, "bfloat16"),
        (Attention.GQA, None, "float16"),
        (Attention.GQA, None, "float32"),
        (Attention.MLA, None, "bfloat16"),
        (Attention.MLA, 7, "bfloat16"),
        (Attention.GQA, 1, "bfloat16"),
        (Attention.GQA, 7, "bfloat16"),
    ],
)
def test_paged_prefill_and_decode_equal_an_unpaged_transformer(
    attention: Attention, window: int | None, kv_dtype: str
) -> None:
    model = Transformer(replace(SMALL, kv_dtype=kv_dtype, attention=attention, window=window))
    kv = PagedKV.private(model.config, num_blocks=12, block_size=4, tp=2)
    at = tables(model, [9, 2, 11, 0, 5, 7, 4, 1, 10, 6])

    prefilled = model.logits(PROMPT, kv, at)
    decoded = model.logits([65], kv, at, start=len(PROMPT))

    torch.testing.assert_close(prefilled, oracle_logits(model, PROMPT), rtol=0, atol=1e-5)
    torch.testing.assert_close(decoded, oracle_logits(model, [*PROMPT, 65]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tokens_per_pass", "window"), [(None, None), (10, 7)])
def test_each_generated_token_is_the_unpaged_transformers_greedy_one(
    tokens_per_pass: int | None, window: int | None
) -> None:
    small = Transformer(replace(SMALL, window=window))

    steps = generate_alone(small, PROMPT, 5, block_size=4, tokens_per_pass=tokens_per_pass)

    tokens = list(PROMPT)
    for step in steps:
        assert step.token == int(oracle_logits(small, tokens).argmax())
        tokens.append(step.token)
