"""A small Llama-style transformer whose KV lives in a `PagedKV`, and greedy generation with it.

It does not batch: a request is computed by itself, so nothing else can change its result.

It computes in float64 on one thread, and reads the KV back from the cache even for the tokens
that it has just written. So the logits are the same bits whether KV was computed here or
copied in, and whatever the block ids, the strides, the tensor and pipeline parallelism are. They
are rounded to float32, which hides the order of sums, but, over a few steps, no flipped bit of a
16-bit cache.

The weights are drawn from a seed, the same on every machine. They are not trained: what counts is
that every byte of the cache has a say in the output.

Unlike in a real engine, K is cached without its RoPE and rotated when it is read: attention does
not see the order of its context, so a handoff that swapped two blocks, each with its rotation,
would change nothing. Rotated by where it was found, a K in the wrong place shows. With MLA the
cache holds one latent for all heads, and K and V are made of it when it is read.

Axes
    token         tokens of this step, by position
    context       tokens of the request that this step's attend to, up to its last
    query_head    query heads of the model
    dim, half     elements of a head, and half of it; of the cache those of a head or of the latent
    hidden, vocab the residual stream, the logits
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from kvbus.demo.messages import Step
from kvbus.demo.options import HEAD_DIM, MAX_TOKENS, MAX_TP
from kvbus.demo.paged_cache import PagedKV
from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, KvPart, num_blocks_for
from kvbus.lab.engine import Tables

COMPUTE_DTYPE = torch.float64
VOCAB = 256  # bytes
ROPE_THETA = 10_000.0

# Random weights of gain one all but ignore the prompt: attention averages it away and the output
# repeats one token. With these gains each byte of a prompt of 200 changes most tokens after it,
# while no token's share of the attention is so small that a change of its K or V gets lost.
QUERY_GAIN = 2.5
OUTPUT_GAIN = 2.0
DOWN_GAIN = 4.0


def first_seen(start: int, window: int | None) -> int:
    """The earliest position that a token at ``start`` attends to."""
    return 0 if window is None else max(0, start - window + 1)


@dataclass(frozen=True)
class LayerWeights:
    """Projections of one layer, each [in, out]; the norms' gains are one.

    ``cached`` give what is cached, by part. ``raised``, with MLA, make K and V of the latent:
    each [query_head, latent, dim].
    """

    query: Tensor
    cached: Mapping[str, Tensor]
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    raised: Mapping[str, Tensor]


class Transformer:
    """The model whose KV an engine of ``spec`` caches, of any shape.

    The default takes 25 MB of weights and milliseconds on one core. Prefill and decode are the same
    computation, over many tokens or over one. It has a multiple of the KV heads as query heads, and
    so many that there can be `MAX_TP` ranks.
    """

    def __init__(
        self,
        spec: EngineSpec,
        seed: int,
        *,
        hidden: int = 256,
        intermediate: int = 512,
        head_dim: int = HEAD_DIM,
    ) -> None:
        self.spec, self._head_dim = spec, head_dim
        self.groups = {layer: group for group in spec.groups for layer in group.layers}
        num_kv_heads = spec.groups[0].num_kv_heads
        self.num_query_heads = -(-MAX_TP // num_kv_heads) * num_kv_heads
        self._generator = torch.Generator().manual_seed(seed)
        self.embedding = self._draw(VOCAB, hidden, sqrt(VOCAB))
        self.layers = [
            self._layer(group, hidden, intermediate) for _, group in sorted(self.groups.items())
        ]
        self.to_logits = self._draw(hidden, VOCAB)
        exponents = torch.arange(0, head_dim, 2, dtype=COMPUTE_DTYPE) / head_dim
        angles = torch.outer(torch.arange(MAX_TOKENS, dtype=COMPUTE_DTYPE), ROPE_THETA**-exponents)
        self._turns = torch.polar(torch.ones_like(angles), angles)

    def _layer(self, group: GroupSpec, hidden: int, intermediate: int) -> LayerWeights:
        query_width = self.num_query_heads * self._head_dim
        cached_width = group.num_kv_heads * group.head_dim
        is_latent = KvPart.LATENT in group.parts
        return LayerWeights(
            query=self._draw(hidden, query_width, QUERY_GAIN),
            cached={part: self._draw(hidden, cached_width) for part in group.parts},
            output=self._draw(query_width, hidden, OUTPUT_GAIN),
            gate=self._draw(hidden, intermediate),
            up=self._draw(hidden, intermediate),
            down=self._draw(intermediate, hidden, DOWN_GAIN),
            raised={
                part: self._draw(group.head_dim, query_width)
                .view(group.head_dim, -1, self._head_dim)
                .transpose(0, 1)
                .contiguous()
                for part in (KvPart.KEY, KvPart.VALUE)
                if is_latent
            },
        )

    def _draw(self, num_in: int, num_out: int, gain: float = 1.0) -> Tensor:
        """[in, out]; what passes through has its variance times ``gain`` squared."""
        drawn = torch.randn(num_in, num_out, generator=self._generator, dtype=COMPUTE_DTYPE)
        return drawn * (gain / sqrt(num_in))

    def logits(
        self, tokens: Sequence[int], kv: PagedKV, tables: Tables, *, start: int = 0
    ) -> Tensor:
        """Computes and caches the KV of ``tokens``, and returns the logits after the last.

        ``start`` is the position of the first of them: what they attend to before it must be in
        the cache, be it by an earlier call (chunked prefill) or by a handoff. Logits: [vocab],
        float32.
        """
        with one_thread():
            x = self.embedding[torch.tensor(tokens)]
            for layer, weights in enumerate(self.layers):
                x = x + self._attention(layer, rms_norm(x), kv, tables, start=start)
                x = x + feed_forward(rms_norm(x), weights)
            return (rms_norm(x[-1]) @ self.to_logits).float()

    def _attention(
        self, layer: int, x: Tensor, kv: PagedKV, tables: Tables, *, start: int
    ) -> Tensor:
        """[token, hidden] → [token, hidden], through the cache."""
        group, weights = self.groups[layer], self.layers[layer]
        table, first = tables[group.name], first_seen(start, group.window)
        cached = {
            part: (x @ projection).view(len(x), group.num_kv_heads, group.head_dim)
            for part, projection in weights.cached.items()
        }
        kv.write(layer, table, start=start, parts=cached)
        num_heads = self.num_query_heads, group.num_kv_heads
        read = kv.read(layer, table, start=first, stop=start + len(x), num_heads=num_heads)
        k, v = keys_and_values(read, weights)
        query = (x @ weights.query).view(len(x), -1, self._head_dim).transpose(0, 1)
        query, k = self._rotated(query, start), self._rotated(k, first)
        attended = attend(query, k, v, window=group.window)
        return attended.transpose(0, 1).flatten(1) @ weights.output

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        """RoPE: turns pairs (i, i + half) of [head, token, dim], from position ``first``."""
        turned = torch.complex(*x.chunk(2, dim=-1)) * self._turns[first : first + x.shape[1]]
        return torch.cat([turned.real, turned.imag], dim=-1)


@dataclass(frozen=True)
class Generation:
    """One request: the model, and its blocks of a cache. The two halves that a handoff joins."""

    model: Transformer
    kv: PagedKV
    tables: Tables

    def prefill(
        self, prompt: Sequence[int], tokens_per_pass: int | None = None
    ) -> Iterator[tuple[int, Step]]:
        """The prefill side, pass by pass (chunked prefill), or, without a number, in one.

        Yields how many tokens are cached now, and the token after them: that of the last pass is
        the first of the output.
        """
        stride = tokens_per_pass or len(prompt)
        for start in range(0, len(prompt), stride):
            tokens = prompt[start : start + stride]
            yield start + len(tokens), self._step(tokens, start)

    def decode(self, token: int, position: int, num_steps: int = 1) -> list[Step]:
        """The decode side: goes on from the ``token`` at ``position``, and returns those after it.

        The cache holds what it attends to before it, and the blocks have room for what is new.
        """
        steps: list[Step] = []
        for number in range(num_steps):
            steps.append(self._step([token], position + number))
            token = steps[-1].token
        return steps

    def _step(self, tokens: Sequence[int], start: int) -> Step:
        return greedy(self.model.logits(tokens, self.kv, self.tables, start=start))


def greedy(logits: Tensor) -> Step:
    """The most likely token; of equals, the lowest."""
    digest = blake2b(logits.numpy().astype("<f4").tobytes(), digest_size=16)
    return Step(token=int(logits.argmax()), digest=digest.hexdigest())


def generate_alone(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    tokens_per_pass: int | None = None,
) -> list[Step]:
    """The reference: one engine does both halves in a cache of its own. At least one token.

    Equal to a handed-off run when ``tokens_per_pass`` is that of its prefill side; with another
    one, sums are taken in another order, which in rare cases changes a digest.
    """
    block_size = model.spec.groups[0].block_size
    num_blocks = num_blocks_for(len(prompt) + max_new_tokens, block_size)
    table = BlockTable.of(range(num_blocks))
    tables = {group.name: table for group in model.spec.groups}
    alone = Generation(model, PagedKV.private(model.spec, num_blocks), tables)
    *_, (_, first) = alone.prefill(prompt, tokens_per_pass)
    return [first, *alone.decode(first.token, len(prompt), max_new_tokens - 1)]


def keys_and_values(parts: Mapping[str, Tensor], weights: LayerWeights) -> tuple[Tensor, Tensor]:
    """K and V that each query head reads, of what is cached; each [query_head, context, dim]."""
    if not weights.raised:
        return parts[KvPart.KEY].to(COMPUTE_DTYPE), parts[KvPart.VALUE].to(COMPUTE_DTYPE)
    latent = parts[KvPart.LATENT].to(COMPUTE_DTYPE)
    return latent @ weights.raised[KvPart.KEY], latent @ weights.raised[KvPart.VALUE]


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


def rms_norm(x: Tensor) -> Tensor:
    """[..., hidden], each vector scaled to a root mean square of one."""
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def feed_forward(x: Tensor, weights: LayerWeights) -> Tensor:
    """SwiGLU: [token, hidden] → [token, hidden]."""
    return (functional.silu(x @ weights.gate) * (x @ weights.up)) @ weights.down


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are split among torch's threads, and so depend on their number: here it is one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
