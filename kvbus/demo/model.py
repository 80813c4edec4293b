"""Small Llama-style transformer, its paged KV cache, and greedy generation.

It computes in float64 on one thread or one GPU, without batches, and reads all KV back from the
cache. So the logits are bit-identical whether KV was computed here or copied, for any block ids,
strides and parallelism. Rounding to float32 hides the order of sums, but no flipped bit of a
16-bit cache.

K is cached without its RoPE and rotated when it is read, so that a misplaced block is detected.

Axes
    token, context  tokens of this step, and all that they attend to
    query_head      query heads of the model
    block, slot     blocks of a rank's cache, token slots of a block
    head            KV heads of the rank, or of the model
    dim             elements of a head, in the cache of a head or of the latent
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from kvbus.demo.options import HEAD_DIM, MAX_TOKENS, MAX_TP, Step
from kvbus.engine import KvCache
from kvbus.geometry import (
    BlockTable,
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    held_heads,
    num_blocks_for,
)
from kvbus.lab.lab_engine import Tables, private_cache

COMPUTE_DTYPE, CPU = torch.float64, torch.device("cpu")
VOCAB = 256  # bytes
ROPE_THETA = 10_000.0

# Random weights of gain one almost ignore the prompt: attention averages it away and the output
# repeats one token. With these gains each byte of a prompt of 200 changes most tokens after it. No
# token's share of the attention is so small that a change of its K or V is lost.
QUERY_GAIN = 2.5
OUTPUT_GAIN = 2.0
DOWN_GAIN = 4.0


def first_seen(start: int, window: int | None) -> int:
    return 0 if window is None else max(0, start - window + 1)


LayerViews = Mapping[str, Tensor]
"""Parts of one layer on one rank, each [block, slot, head, dim] with any strides."""


@dataclass(frozen=True)
class PagedKV:
    """``views[rank][layer][part]``; writing casts to the cache's dtype."""

    views: Sequence[Mapping[int, LayerViews]]

    @classmethod
    def of(cls, caches: Sequence[KvCache]) -> "PagedKV":
        return cls(
            [
                {
                    layer: {part: cache.view(layer, part) for part in region.parts}
                    for region in cache.rank.regions
                    for layer in region.layers
                }
                for cache in caches
            ]
        )

    @classmethod
    def private(cls, spec: EngineSpec, num_blocks: int, device: torch.device = CPU) -> "PagedKV":
        layout, ranks = KvLayout.parse("NHD"), range(spec.num_ranks)
        return cls.of([private_cache(spec, rank, layout, num_blocks, device) for rank in ranks])

    def on(self, device: torch.device) -> "PagedKV":
        """Return a copy there, or this cache if it is there."""
        return PagedKV(
            [
                {
                    layer: {part: view.to(device) for part, view in views.items()}
                    for layer, views in layers.items()
                }
                for layers in self.views
            ]
        )

    def ranks_of(self, layer: int) -> Sequence[LayerViews]:
        return [layers[layer] for layers in self.views if layer in layers]

    def write(self, layer: int, table: BlockTable, *, start: int, parts: LayerViews) -> None:
        """Write ``parts``, [token, head, dim] with all KV heads: each rank gets its own."""
        ranks = self.ranks_of(layer)
        for rank, views in enumerate(ranks):
            for part, values in parts.items():
                heads = held_heads(rank, len(ranks), values.shape[1])
                index = slots(table, views[part], start, start + len(values))
                views[part][index] = values[:, heads.start : heads.stop].to(views[part].dtype)

    def read(
        self, layer: int, table: BlockTable, *, start: int, stop: int, num_heads: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return parts by query head, contiguous [query_head, token, dim].

        Shapes, and so later bits, do not depend on tensor parallelism.
        """
        ranks = [
            {part: view[slots(table, view, start, stop)] for part, view in views.items()}
            for views in self.ranks_of(layer)
        ]
        readers = held_by_query_head(*num_heads, len(ranks))
        return {
            part: torch.stack([ranks[rank][part][:, head] for rank, head in readers])
            for part in ranks[0]
        }


def held_by_query_head(num_query_heads: int, num_kv_heads: int, tp: int) -> list[tuple[int, int]]:
    """Return (rank, number among the rank's heads) of the KV head of each query head.

    Ranks share the query heads of a common KV head, so that each copy is read.
    """
    copies: list[list[tuple[int, int]]] = [[] for _ in range(num_kv_heads)]
    for rank in range(tp):
        for number, head in enumerate(held_heads(rank, tp, num_kv_heads)):
            copies[head].append((rank, number))
    sharing = num_query_heads // num_kv_heads
    return [held[i * len(held) // sharing] for held in copies for i in range(sharing)]


def slots(table: BlockTable, view: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return block and slot, each [token]."""
    block_size, positions = view.shape[1], torch.arange(start, stop, device=view.device)
    ids = torch.from_numpy(table.array().astype("int64")).to(view.device)
    return ids[positions // block_size - table.first_block], positions % block_size


Weights = Mapping[str, Tensor]
"""Weights of one layer, each [in, out]. Cached parts have their own names."""


class Transformer:
    def __init__(
        self,
        spec: EngineSpec,
        seed: int = 0,
        *,
        device: str = "cpu",
        hidden: int = 256,
        intermediate: int = 512,
        head_dim: int = HEAD_DIM,
    ) -> None:
        self.spec, self.device, self._head_dim = spec, torch.device(device), head_dim
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
        self._turns = torch.polar(torch.ones_like(angles), angles).to(self.device)

    def _layer(self, group: GroupSpec, hidden: int, intermediate: int) -> Weights:
        query_width = self.num_query_heads * self._head_dim
        weights = {
            "query": self._draw(hidden, query_width, QUERY_GAIN),
            "output": self._draw(query_width, hidden, OUTPUT_GAIN),
            "gate": self._draw(hidden, intermediate),
            "up": self._draw(hidden, intermediate),
            "down": self._draw(intermediate, hidden, DOWN_GAIN),
        }
        for part in group.parts:
            weights[part] = self._draw(hidden, group.num_kv_heads * group.head_dim)
        if KvPart.LATENT in group.parts:
            for part in (KvPart.KEY, KvPart.VALUE):
                weights[part] = self._draw(group.head_dim, query_width)
        return weights

    def _draw(self, num_in: int, num_out: int, gain: float = 1.0) -> Tensor:
        """Return [in, out]; it scales the variance by ``gain`` squared."""
        drawn = torch.randn(num_in, num_out, generator=self._generator, dtype=COMPUTE_DTYPE)
        return (drawn * (gain / sqrt(num_in))).to(self.device)

    def logits(
        self, tokens: Sequence[int], kv: PagedKV, tables: Tables, *, start: int = 0
    ) -> Tensor:
        """Cache the KV of ``tokens``; return the last logits: [vocab], float32.

        The cache must hold the KV before ``start``.
        """
        torch.set_num_threads(1)  # otherwise sums depend on the number of threads
        x = self.embedding[torch.tensor(tokens, device=self.device)]
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
            part: (x @ weights[part]).view(len(x), group.num_kv_heads, group.head_dim)
            for part in group.parts
        }
        kv.write(layer, table, start=start, parts=cached)
        num_heads = self.num_query_heads, group.num_kv_heads
        read = kv.read(layer, table, start=first, stop=start + len(x), num_heads=num_heads)
        k, v = keys_and_values(read, weights)
        query = (x @ weights["query"]).view(len(x), -1, self._head_dim).transpose(0, 1)
        query, k = self._rotated(query, start), self._rotated(k, first)
        attended = attend(query, k, v, window=group.window)
        return attended.transpose(0, 1).flatten(1) @ weights["output"]

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        """RoPE: rotate pairs (i, i + half) of [head, token, dim]."""
        turned = torch.complex(*x.chunk(2, dim=-1)) * self._turns[first : first + x.shape[1]]
        return torch.cat([turned.real, turned.imag], dim=-1)


@dataclass(frozen=True)
class Generation:
    model: Transformer
    kv: PagedKV
    tables: Tables

    def prefill(
        self, prompt: Sequence[int], tokens_per_pass: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of tokens after each pass, and logits; a GPU may still compute them."""
        stride = tokens_per_pass or len(prompt)
        for start in range(0, len(prompt), stride):
            tokens = prompt[start : start + stride]
            yield start + len(tokens), self._logits(tokens, start)

    def decode(self, token: int, position: int, num_steps: int = 1) -> list[Step]:
        steps: list[Step] = []
        for number in range(num_steps):
            steps.append(greedy(self._logits([token], position + number)))
            token = steps[-1].token
        return steps

    def _logits(self, tokens: Sequence[int], start: int) -> Tensor:
        return self.model.logits(tokens, self.kv, self.tables, start=start)


def greedy(logits: Tensor) -> Step:
    """Return the lowest of equally likely tokens; wait for the GPU."""
    found = logits.cpu()
    digest = blake2b(found.numpy().astype("<f4").tobytes(), digest_size=16)
    return Step(token=int(found.argmax()), digest=digest.hexdigest())


def generate_alone(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    tokens_per_pass: int | None = None,
    decoder: Transformer | None = None,
) -> list[Step]:
    """Return the steps of ``model``, and after the first token of ``decoder``, if given.

    Devices and ``tokens_per_pass`` must be those of the engines: another order of sums can change
    a digest.
    """
    block_size = model.spec.groups[0].block_size
    num_blocks = num_blocks_for(len(prompt) + max_new_tokens, block_size)
    table = BlockTable.of(range(num_blocks))
    tables = {group.name: table for group in model.spec.groups}
    kv = PagedKV.private(model.spec, num_blocks, model.device)
    *_, (_, logits) = Generation(model, kv, tables).prefill(prompt, tokens_per_pass)
    first = greedy(logits)
    decoder = decoder or model
    alone = Generation(decoder, kv.on(decoder.device), tables)
    return [first, *alone.decode(first.token, len(prompt), max_new_tokens - 1)]


def keys_and_values(parts: Mapping[str, Tensor], weights: Weights) -> list[Tensor]:
    """Return K and V, each [query_head, context, dim]."""
    read = {part: cached.to(COMPUTE_DTYPE) for part, cached in parts.items()}
    if (latent := read.get(KvPart.LATENT)) is not None:
        num_heads, _, dim = latent.shape
        for part in (KvPart.KEY, KvPart.VALUE):
            read[part] = latent @ weights[part].view(dim, num_heads, -1).transpose(0, 1)
    return [read[KvPart.KEY], read[KvPart.VALUE]]


def attend(query: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """Return causal attention of ``query`` [query_head, token, dim] to [query_head, context, dim].

    Each token attends to ``window`` tokens, itself included.
    """
    num_tokens, num_context = query.shape[1], k.shape[1]
    scores = query @ k.transpose(1, 2) / sqrt(query.shape[2])
    key_positions = torch.arange(num_context, device=query.device)
    query_positions = key_positions[num_context - num_tokens :].unsqueeze(1)
    masked = key_positions > query_positions
    if window is not None:
        masked = masked | (key_positions <= query_positions - window)
    return scores.masked_fill(masked, float("-inf")).softmax(-1) @ v


def rms_norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def feed_forward(x: Tensor, weights: Weights) -> Tensor:
    return (functional.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]
