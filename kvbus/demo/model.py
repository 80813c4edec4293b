"""Owns a small Llama-style transformer whose K and V live in a `PagedKV`, in blocks of any order.

Refuses to batch: a request is computed by itself, so nothing else can change its result.

It computes in float64 on one thread, and reads K and V back from the cache even for the tokens
that it has just written. So the logits are the same bits whether K and V were computed here or
copied in, and whatever the block ids, the strides and the tensor parallelism are. They are rounded
to float32, which hides the order of sums, but, over a few steps, no flipped bit of a 16-bit K or V.

Unlike in a real engine, K is cached without its RoPE and rotated when it is read: attention does
not see the order of its context, so a handoff that swapped two blocks, each with its rotation,
would change nothing. Rotated by where it was found, a K in the wrong place shows.

Axes
    token         tokens of this step, by position
    context       all tokens of the request up to this step's last
    query_head    query heads of the model
    kv_head       KV heads of the model; a rank holds an interval of them
    dim, half     ``head_dim``, and half of it
    hidden, inner, vocab
                  the residual stream, the feed-forward's inside, the logits
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from kvbus.demo.model_config import ModelConfig
from kvbus.demo.paged_cache import PagedKV, held_head_of_each_query_head
from kvbus.errors import LocalError
from kvbus.geometry import held_heads

COMPUTE_DTYPE = torch.float64

# Random weights of gain one all but ignore the prompt: attention averages it away and the output
# repeats one token. With these gains each byte of a prompt of 200 changes most tokens after it,
# while no token's share of the attention is so small that a change of its K or V gets lost.
QUERY_GAIN = 2.5
OUTPUT_GAIN = 2.0
DOWN_GAIN = 4.0


@dataclass(frozen=True)
class Slots:
    """Where this step's request is cached; ``start`` is the position of the step's first token."""

    kv: PagedKV
    block_ids: Sequence[int]
    start: int


@dataclass(frozen=True)
class LayerWeights:
    """Projections of one layer, each [in, out]; the norms' gains are one."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """``embedding`` is [vocab, hidden], ``logits`` [hidden, vocab]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    logits: Tensor

    @classmethod
    def seeded(cls, config: ModelConfig) -> "Weights":
        """Random weights that keep the variance of what passes through them; same seed, same."""
        generator = torch.Generator().manual_seed(config.seed)

        def projection(num_in: int, num_out: int, gain: float = 1.0) -> Tensor:
            drawn = torch.randn(num_in, num_out, generator=generator, dtype=COMPUTE_DTYPE)
            return drawn * (gain / sqrt(num_in))

        def layer() -> LayerWeights:
            hidden, inner = config.hidden, config.intermediate
            query_width = config.num_query_heads * config.head_dim
            kv_width = config.num_kv_heads * config.head_dim
            return LayerWeights(
                query=projection(hidden, query_width, QUERY_GAIN),
                key=projection(hidden, kv_width),
                value=projection(hidden, kv_width),
                output=projection(query_width, hidden, OUTPUT_GAIN),
                gate=projection(hidden, inner),
                up=projection(hidden, inner),
                down=projection(inner, hidden, DOWN_GAIN),
            )

        return cls(
            embedding=projection(config.vocab, config.hidden, sqrt(config.vocab)),
            layers=tuple(layer() for _ in range(config.num_layers)),
            logits=projection(config.hidden, config.vocab),
        )


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of the rotation of each position, each [max_tokens, half]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, config: ModelConfig) -> "Rope":
        """The rotations of every position that the model has."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=COMPUTE_DTYPE) / config.head_dim
        positions = torch.arange(config.max_tokens, dtype=COMPUTE_DTYPE)
        angles = torch.outer(positions, config.rope_theta**-exponents)
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Tensor, *, first: int) -> Tensor:
        """Turns pairs (i, i + half) of [head, token, dim], tokens from position ``first``."""
        cos, sin = (table[first : first + x.shape[1]] for table in (self.cos, self.sin))
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Transformer:
    """Prefill and decode are the same computation, over many tokens or over one."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.weights = Weights.seeded(config)
        self._rope = Rope.of(config)

    def prefill(
        self, tokens: Sequence[int], kv: PagedKV, block_ids: Sequence[int], *, start: int = 0
    ) -> Tensor:
        """Computes and caches the K and V of ``tokens``, and returns the logits after the last.

        ``start`` is the position of the first of them: what is before it must be in the cache,
        be it by an earlier call (chunked prefill) or by a handoff. Logits: [vocab], float32.
        """
        self._check(tokens, start)
        slots = Slots(kv, block_ids, start)
        with one_thread():
            x = self.weights.embedding[torch.tensor(tokens)]
            for layer, weights in enumerate(self.weights.layers):
                x = x + self._attention(layer, rms_norm(x), slots)
                x = x + feed_forward(rms_norm(x), weights)
            return (rms_norm(x[-1]) @ self.weights.logits).float()

    def decode_step(
        self, token: int, position: int, kv: PagedKV, block_ids: Sequence[int]
    ) -> Tensor:
        """Caches K and V of the token at ``position``; logits of the next: [vocab], float32."""
        return self.prefill([token], kv, block_ids, start=position)

    def _check(self, tokens: Sequence[int], start: int) -> None:
        if not tokens or min(tokens) < 0 or max(tokens) >= self.config.vocab:
            raise LocalError(f"tokens must be one or more of 0..{self.config.vocab - 1}")
        if start < 0 or start + len(tokens) > self.config.max_tokens:
            raise LocalError(
                f"tokens {start}..{start + len(tokens) - 1} exceed max_tokens"
                f" {self.config.max_tokens}"
            )

    def _attention(self, layer: int, x: Tensor, slots: Slots) -> Tensor:
        """[token, hidden] → [token, hidden], through the cache."""
        weights = self.weights.layers[layer]
        stop = slots.start + x.shape[0]
        query, key, value = (
            self._split_heads(x @ projection)
            for projection in (weights.query, weights.key, weights.value)
        )
        self._write(layer, key, value, slots)
        k, v = self._gather(layer, slots, num_tokens=stop)
        query = self._rope.rotate(query.transpose(0, 1), first=slots.start)
        attended = attend(query, self._rope.rotate(k, first=0), v)
        return attended.transpose(0, 1).flatten(1) @ weights.output

    def _split_heads(self, x: Tensor) -> Tensor:
        """[token, head * dim] → [token, head, dim]."""
        return x.view(x.shape[0], -1, self.config.head_dim)

    def _write(self, layer: int, key: Tensor, value: Tensor, slots: Slots) -> None:
        """Gives each rank its heads of K and V, each [token, kv_head, dim]."""
        for rank in range(slots.kv.tp):
            held = held_heads(rank, slots.kv.tp, self.config.num_kv_heads)
            k, v = (whole[:, held.start : held.stop] for whole in (key, value))
            slots.kv.write(rank, layer, block_ids=slots.block_ids, start=slots.start, k=k, v=v)

    def _gather(self, layer: int, slots: Slots, *, num_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V that each query head reads, each contiguous [query_head, context, dim].

        The same shapes for any tensor parallelism: what follows computes the same bits.
        """
        kv, block_ids = slots.kv, slots.block_ids
        ranks = [
            kv.gather(rank, layer, block_ids=block_ids, num_tokens=num_tokens)
            for rank in range(kv.tp)
        ]
        heads = held_head_of_each_query_head(self.config, kv.tp)
        k = torch.stack([ranks[head.rank][0][:, head.local_head] for head in heads])
        v = torch.stack([ranks[head.rank][1][:, head.local_head] for head in heads])
        return k.to(COMPUTE_DTYPE), v.to(COMPUTE_DTYPE)


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are split among torch's threads, and so depend on their number: here it is one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def rms_norm(x: Tensor) -> Tensor:
    """[..., hidden], each vector scaled to a root mean square of one."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def attend(query: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: [query_head, token, dim] over [query_head, context, dim].

    The tokens are the last ones of the context.
    """
    num_tokens, num_context = query.shape[1], k.shape[1]
    scores = query @ k.transpose(1, 2) / sqrt(query.shape[2])
    later = torch.ones(num_tokens, num_context, dtype=torch.bool)
    later = later.triu(num_context - num_tokens + 1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def feed_forward(x: Tensor, weights: LayerWeights) -> Tensor:
    """SwiGLU: [token, hidden] → [token, hidden]."""
    return (functional.silu(x @ weights.gate) * (x @ weights.up)) @ weights.down
