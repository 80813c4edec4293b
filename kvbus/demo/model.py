"""A small Llama-style transformer whose KV lives in a `PagedKV`, in blocks of any order.

It does not batch: a request is computed by itself, so nothing else can change its result.

It computes in float64 on one thread, and reads the KV back from the cache even for the tokens
that it has just written. So the logits are the same bits whether KV was computed here or
copied in, and whatever the block ids, the strides, the tensor and pipeline parallelism are. They
are rounded to float32, which hides the order of sums, but, over a few steps, no flipped bit of a
16-bit cache.

Unlike in a real engine, K is cached without its RoPE and rotated when it is read: attention does
not see the order of its context, so a handoff that swapped two blocks, each with its rotation,
would change nothing. Rotated by where it was found, a K in the wrong place shows. With MLA the
cache holds one latent for all heads, and K and V are made of it when it is read.

Axes
    token         tokens of this step, by position
    context       tokens of the request that this step's attend to, up to its last
    query_head    query heads of the model
    head          heads of the cache; a rank holds an interval of them
    dim, half     ``head_dim``, and half of it; of the cache ``cache_dim``
    hidden, vocab the residual stream, the logits
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from kvbus.demo.blocks import Tables
from kvbus.demo.model_config import MAX_TOKENS, ModelConfig
from kvbus.demo.paged_cache import PagedKV, gather, held_by_query_head, write
from kvbus.demo.weights import COMPUTE_DTYPE, LayerWeights, Weights
from kvbus.errors import LocalError
from kvbus.geometry import KvPart, held_heads


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of the rotation of each position, each [max_tokens, half]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, config: ModelConfig) -> "Rope":
        """The rotations of every position that the model has."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=COMPUTE_DTYPE) / config.head_dim
        positions = torch.arange(MAX_TOKENS, dtype=COMPUTE_DTYPE)
        angles = torch.outer(positions, config.rope_theta**-exponents)
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Tensor, *, first: int) -> Tensor:
        """Turns pairs (i, i + half) of [head, token, dim], tokens from position ``first``."""
        cos, sin = (table[first : first + x.shape[1]] for table in (self.cos, self.sin))
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def first_seen(start: int, window: int | None) -> int:
    """The earliest position that a token at ``start`` attends to."""
    return 0 if window is None else max(0, start - window + 1)


def attend(query: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """Causal attention: [query_head, token, dim] over [query_head, context, dim].

    The tokens are the last ones of the context; each sees ``window`` of them, itself included.
    """
    num_tokens, num_context = query.shape[1], k.shape[1]
    scores = query @ k.transpose(1, 2) / sqrt(query.shape[2])
    token = torch.arange(num_context - num_tokens, num_context).unsqueeze(1)
    context = torch.arange(num_context)
    unseen = context > token
    if window is not None:
        unseen = unseen | (context <= token - window)
    return scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v


@dataclass(frozen=True)
class Slots:
    """Where this step's request is cached; ``start`` is the position of the step's first token."""

    kv: PagedKV
    tables: Tables
    start: int


class Transformer:
    """Prefill and decode are the same computation, over many tokens or over one."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.weights = Weights.seeded(config)
        self._rope = Rope.of(config)

    def prefill(
        self, tokens: Sequence[int], kv: PagedKV, tables: Tables, *, start: int = 0
    ) -> Tensor:
        """Computes and caches the KV of ``tokens``, and returns the logits after the last.

        ``start`` is the position of the first of them: what they attend to before it must be in
        the cache, be it by an earlier call (chunked prefill) or by a handoff. Logits: [vocab],
        float32.
        """
        self._check(tokens, start)
        at = Slots(kv, tables, start)
        with one_thread():
            x = self.weights.embedding[torch.tensor(tokens)]
            for layer, weights in enumerate(self.weights.layers):
                x = x + self._attention(layer, rms_norm(x), at)
                x = x + feed_forward(rms_norm(x), weights)
            return (rms_norm(x[-1]) @ self.weights.logits).float()

    def decode_step(self, token: int, position: int, kv: PagedKV, tables: Tables) -> Tensor:
        """Caches the KV of the token at ``position``; logits of the next: [vocab], float32."""
        return self.prefill([token], kv, tables, start=position)

    def _check(self, tokens: Sequence[int], start: int) -> None:
        if not tokens or min(tokens) < 0 or max(tokens) >= self.config.vocab:
            raise LocalError(f"tokens must be one or more of 0..{self.config.vocab - 1}")
        if start < 0 or start + len(tokens) > MAX_TOKENS:
            raise LocalError(
                f"tokens {start}..{start + len(tokens) - 1} exceed max_tokens {MAX_TOKENS}"
            )

    def _attention(self, layer: int, x: Tensor, at: Slots) -> Tensor:
        """[token, hidden] → [token, hidden], through the cache."""
        weights, window = self.weights.layers[layer], self.config.window_of(layer)
        stop, first = at.start + x.shape[0], first_seen(at.start, window)
        self._write(layer, x, at)
        k, v = self._keys_and_values(layer, at, first, stop)
        query = (x @ weights.query).view(x.shape[0], -1, self.config.head_dim).transpose(0, 1)
        query = self._rope.rotate(query, first=at.start)
        attended = attend(query, self._rope.rotate(k, first=first), v, window=window)
        return attended.transpose(0, 1).flatten(1) @ weights.output

    def _write(self, layer: int, x: Tensor, at: Slots) -> None:
        """Gives each rank its heads of what is cached of x, [token, hidden]."""
        config, table = self.config, at.tables[self.config.group_of(layer)]
        cached = {
            part: (x @ projection).view(x.shape[0], config.cache_heads, config.cache_dim)
            for part, projection in self.weights.layers[layer].cached.items()
        }
        ranks = at.kv.ranks_of(layer)
        for tp_rank, views in enumerate(ranks):
            held = held_heads(tp_rank, len(ranks), config.cache_heads)
            parts = {part: whole[:, held.start : held.stop] for part, whole in cached.items()}
            write(views, table, start=at.start, parts=parts)

    def _keys_and_values(
        self, layer: int, at: Slots, first: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """K and V that each query head reads, each [query_head, context, dim]."""
        parts, raised = self._gather(layer, at, first, stop), self.weights.layers[layer].raised
        if not raised:
            return parts[KvPart.KEY], parts[KvPart.VALUE]
        latent = parts[KvPart.LATENT]
        return latent @ raised[KvPart.KEY], latent @ raised[KvPart.VALUE]

    def _gather(self, layer: int, at: Slots, first: int, stop: int) -> Mapping[KvPart, Tensor]:
        """What each query head reads, each part contiguous [query_head, context, dim].

        The same shapes for any tensor parallelism: what follows computes the same bits.
        """
        table = at.tables[self.config.group_of(layer)]
        ranks = [gather(views, table, start=first, stop=stop) for views in at.kv.ranks_of(layer)]
        config = self.config
        held = held_by_query_head(config.num_query_heads, config.cache_heads, len(ranks))
        return {
            part: torch.stack([ranks[rank][part][:, head] for rank, head in held]).to(COMPUTE_DTYPE)
            for part in config.parts
        }


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


def feed_forward(x: Tensor, weights: LayerWeights) -> Tensor:
    """SwiGLU: [token, hidden] → [token, hidden]."""
    return (functional.silu(x @ weights.gate) * (x @ weights.up)) @ weights.down
